"""The pieces a connection's bytes are parsed in: a request ends where one does, and the parser is told the same."""

from __future__ import annotations

import httptools
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.unparsed import Unparsed
from tests.support.arbitrary import fuzzed

BREAKS = st.sampled_from([b"", b"\r\n", b"\r\n\r\n"])
BODIES = st.lists(st.sampled_from([b"x", b"\r", b"\n", b"0", b"\r\n\r\n", b"0\r\n\r\n"]), max_size=6).map(b"".join)
HEADERS = st.lists(st.sampled_from([b"a:\r\n", b"a: \r\n", b"a: b\r\n"]), max_size=3).map(b"".join)


def plain(before: bytes, headers: bytes) -> bytes:
    return before + b"GET /a HTTP/1.1\r\n" + headers + b"\r\n"


def measured(before: bytes, headers: bytes, body: bytes) -> bytes:
    return before + b"POST /b HTTP/1.1\r\n" + headers + b"content-length: %d\r\n\r\n" % len(body) + body


def chunked(before: bytes, headers: bytes, bodies: list[bytes], extension: bytes, trailers: bytes) -> bytes:
    head = before + b"POST /c HTTP/1.1\r\n" + headers + b"transfer-encoding: chunked\r\n\r\n"
    chunks = [b"%x%s\r\n%s\r\n" % (len(body), extension, body) for body in bodies if body]
    return head + b"".join(chunks) + b"0" + extension + b"\r\n" + trailers + b"\r\n"


REQUESTS = st.one_of(
    st.builds(plain, BREAKS, HEADERS),
    st.builds(measured, BREAKS, HEADERS, BODIES),
    st.builds(
        chunked, BREAKS, HEADERS, st.lists(BODIES, max_size=3), st.sampled_from([b"", b";a=b"]),
        st.sampled_from([b"", b"b: c\r\n", b"b:\r\nc: \r\n"]),
    ),
)  # fmt: skip


class Heard:
    """What a parser says, with the parts of a body put together."""

    def __init__(self) -> None:
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.said: list[tuple[str, bytes]] = []
        self.left_bytes: int | None = None
        self.ended = 0

    def on_message_begin(self) -> None:
        self.said.append(("url", b""))

    def on_url(self, url: bytes) -> None:
        self.said[-1] = ("url", self.said[-1][1] + url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.said.append((name.decode(), value))
        if name == b"content-length":
            self.left_bytes = int(value)

    def on_body(self, body: bytes) -> None:
        if self.said[-1][0] == "body":
            body = self.said.pop()[1] + body
        self.said.append(("body", body))

    def on_message_complete(self) -> None:
        self.said.append(("end", b""))
        self.ended += 1
        self.left_bytes = None


@fuzzed
@given(st.lists(REQUESTS, min_size=1, max_size=4), st.lists(st.integers(1, 60), min_size=1, max_size=20))
def test_each_request_ends_with_a_piece_and_nothing_is_lost(requests: list[bytes], reads: list[int]) -> None:
    sent = b"".join(requests)
    whole, cut, unparsed = Heard(), Heard(), Unparsed()
    whole.parser.feed_data(sent)
    ends = []
    start = taken = turn = 0
    while start < len(sent):
        read = sent[start : start + reads[turn % len(reads)]]
        start, turn = start + len(read), turn + 1
        unparsed.add(read)
        while piece := unparsed.take(cut.left_bytes):
            if cut.left_bytes is not None:
                cut.left_bytes -= len(piece)
            taken, ended = taken + len(piece), cut.ended
            cut.parser.feed_data(piece)
            ends += [taken] * (cut.ended - ended)
    assert cut.said == whole.said
    assert ends == [sum(map(len, requests[: n + 1])) for n in range(len(requests))]
    assert unparsed.held_bytes == 0


def test_what_may_become_an_empty_line_waits_for_the_rest() -> None:
    unparsed = Unparsed()
    unparsed.add(b"GET / HTTP/1.1\r\n\r")
    assert bytes(unparsed.take(None)) == b"GET / HTTP/1.1"
    assert not unparsed.take(None)
    unparsed.add(b"\nGET")
    assert bytes(unparsed.take(None)) == b"\r\n\r\n"
    assert (bytes(unparsed.take(None)), unparsed.held_bytes) == (b"GET", 0)
