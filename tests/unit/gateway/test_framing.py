"""What of a connection is no request: what frames a body, and what comes between one answer and the next request."""

from __future__ import annotations

import asyncio

import pytest

from services.gateway.limits import MAX_HEAD_BYTES
from services.gateway.protocol import MAX_LOOKS
from tests.unit.gateway.test_protocol import GET, Listener, Refuser, connection, served

CHUNKED = b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
OFFER = b"POST / HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\ncontent-length: 2\r\n\r\n{}"


async def test_what_comes_with_the_end_of_a_body_full_of_empty_lines_is_answered_too() -> None:
    """It is parsed a part at a time, and each request ends with a piece."""
    app = Listener()
    body = b"\r\n\r\n" * (3 * MAX_LOOKS)
    async with asyncio.timeout(60), served(app) as address:
        reader, writer = await asyncio.open_connection(*address)
        app.goes.release()
        writer.write(CHUNKED + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) + OFFER + GET)
        for _ in range(2):
            app.goes.release()
        answers = [await reader.readuntil(b"ok") for _ in range(3)]
        writer.close()
    assert [answer.count(b"HTTP/1.1 200 OK") for answer in answers] == [1, 1, 1]


@pytest.mark.parametrize("filler", [b"x: y\r\n", b"x" * 100], ids=["fields", "one field"])
async def test_what_comes_behind_the_last_chunk_is_not_held(filler: bytes) -> None:
    clockwork, protocol = connection(Listener())
    protocol.data_received(CHUNKED + b"1\r\nx\r\n0\r\n")
    for _ in range(MAX_HEAD_BYTES // len(filler)):
        protocol.data_received(filler)
    assert (len(protocol.headers), clockwork.aborted) == (1, False)
    protocol.data_received(filler)
    protocol.data_received(filler)
    assert clockwork.aborted
    clockwork.closed = True
    protocol.connection_lost(None)
    await asyncio.gather(*protocol.tasks)


@pytest.mark.parametrize("sent", [GET, b"POST / HTTP/1.1\r\ncontent-length: 2\r\n\r\n"])
async def test_a_connection_without_a_request_is_closed_at_last(sent: bytes) -> None:
    """Whatever came since the last answer: an empty line, or the body that it did not wait for."""
    clockwork, protocol = connection(Refuser(keeps=True))
    protocol.data_received(sent)
    await asyncio.gather(*protocol.tasks)
    await asyncio.sleep(0)  # what is called when it is done
    protocol.data_received(b"{}" if b"POST" in sent else b"\r\n\r\n")
    assert protocol.timeout_keep_alive_task is None
    timer = clockwork.timers[-1]
    assert (timer.delay_s, timer.cancelled) == (protocol.timeout_keep_alive, False)
    timer.rings()
    assert clockwork.closed
