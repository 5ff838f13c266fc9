"""A form with one file in it, parsed as it arrives: nothing is kept of the file but what has not been taken yet."""

from __future__ import annotations

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from services.gateway.problem import Problem

FILE = "file"
"""Name of the field that is the file."""

MAX_FIELD_BYTES = 4096
"""Of one field that is not the file, and of a header in the form."""

MAX_FIELDS = 16
"""Fields of a form: four times what OpenAI's API knows."""


class Form:
    """Feed it the body; take the file's content from `content` whenever there is some."""

    def __init__(self, content_type: str) -> None:
        """Expect a body of this content type; raises Problem if it is not a form."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not boundary:
            shown = content_type[:80]
            raise Problem(415, f"content-type: must be multipart/form-data, got {shown!r}", "", "unsupported_media")
        self.fields: dict[str, str] = {}
        self.content = bytearray()
        self.filename: str | None = None
        """Of the file; None before its part has begun."""
        self.whole = False
        """Whether the end of the form has been seen."""
        self._name = ""
        self._value = bytearray()
        self._header = (bytearray(), bytearray())
        self._headers: dict[bytes, bytes] = {}
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._part_begins,
                    "on_header_field": lambda data, start, end: self._header[0].extend(data[start:end]),
                    "on_header_value": lambda data, start, end: self._header[1].extend(data[start:end]),
                    "on_header_end": self._header_ends,
                    "on_headers_finished": self._named,
                    "on_part_data": self._part_goes_on,
                    "on_part_end": self._part_ends,
                    "on_end": self._ends,
                },
                max_header_size=MAX_FIELD_BYTES,
            )
        except FormParserError as error:
            raise wrong(str(error)) from None

    def feed(self, data: bytes) -> None:
        """Take more of the body; raises Problem if it is not a form."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise wrong(str(error)) from None

    def finish(self) -> None:
        """Say that the body is over; raises Problem if the form is not."""
        if not self.whole:
            raise wrong("it ends before its last boundary")
        if self.filename is None:
            raise Problem(400, "file: is missing", FILE, "missing_parameter")

    def _part_begins(self) -> None:
        self._headers = {}
        self._value = bytearray()

    def _header_ends(self) -> None:
        name, value = self._header
        self._headers[bytes(name).lower()] = bytes(value)
        self._header = (bytearray(), bytearray())

    def _named(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if not self._name:
            raise wrong("a part has no name")
        if self._name in self.fields or (self._name == FILE and self.filename is not None):
            raise Problem(400, f"{self._name[:80]}: is given twice", self._name[:80], "invalid_value")
        if self._name == FILE:
            self.filename = options.get(b"filename", b"").decode("utf-8", "replace")
        elif len(self.fields) == MAX_FIELDS:
            raise wrong(f"it has more than {MAX_FIELDS} fields")

    def _part_goes_on(self, data: bytes, start: int, end: int) -> None:
        if self._name == FILE:
            self.content += memoryview(data)[start:end]
            return
        self._value += data[start:end]
        if len(self._value) > MAX_FIELD_BYTES:
            text = f"{self._name[:80]}: at most {MAX_FIELD_BYTES} bytes are allowed"
            raise Problem(400, text, self._name[:80], "invalid_value")

    def _part_ends(self) -> None:
        if self._name != FILE:
            self.fields[self._name] = self._value.decode("utf-8", "replace")

    def _ends(self) -> None:
        self.whole = True


def wrong(text: str) -> Problem:
    """Return what a client is told of a body that is no form."""
    return Problem(400, f"the body is not a form: {text}", "", "invalid_form")
