"""`/v1/files`: what clients upload, and the output and error files of batches."""

from __future__ import annotations

from collections.abc import Awaitable
from contextlib import suppress
from typing import Any

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock.credentials import act_for
from penstock.errors import NotFound, PenstockError
from penstock.files.v1 import files_pb2 as pb
from services.gateway.batch.output import Output
from services.gateway.batch.records import BatchRecords, DamagedError, damaged
from services.gateway.batch.reruns import Reruns
from services.gateway.core.batch import Batch
from services.gateway.doorman import Doorman
from services.gateway.download import Download
from services.gateway.hangup import until_hangup
from services.gateway.limits import CLIENT_CLOSED
from services.gateway.listing import Listing, sent
from services.gateway.metrics import GatewayMetrics
from services.gateway.pages import Pages, content_of
from services.gateway.places import Places
from services.gateway.problem import NO_RETRY, Problem, of_error
from services.gateway.shelf import Shelf
from services.gateway.upload import Upload
from services.gateway.vigil import Vigil

FILES_URL = "/v1/files"

MOST_LISTED = 10_000
"""Files in one list, as OpenAI allows."""

LISTED_AT_ONCE = 500
"""Files read at once for it: less than a MiB, whatever they are called."""

IN_MEMORY_BYTES = 512
"""What a file's description takes beside what it takes encoded."""

INPUT_ORDER = "input"
ORDERS = ("completion", INPUT_ORDER)
"""Of the lines of an output or error file, by the query parameter `order`."""


class Files:
    """Serves files."""

    def __init__(
        self,
        shelf: Shelf,
        records: BatchRecords,
        output: Output,
        pages: Pages,
        metrics: GatewayMetrics,
        vigil: Vigil,
        doorman: Doorman,
        most_bytes: int,
        silence_s: float,
    ) -> None:
        """Keep files of at most `most_bytes` on `shelf`; an uploader silent for `silence_s` has gone.

        `doorman` says whose an upload is before anything of it is read.
        """
        self._shelf = shelf
        self._records = records
        self._output = output
        self._pages = pages
        self._metrics = metrics
        self._vigil = vigil
        self._doorman = doorman
        self._most_bytes = most_bytes
        self._places = Places()
        self._silence_s = silence_s
        self._reruns = Reruns(output, records)

    def routes(self) -> list[Route]:
        """Return the endpoints."""
        return [
            Route(FILES_URL, self.create, methods=["POST"]),
            Route(FILES_URL, self.list_files, methods=["GET"]),
            Route(f"{FILES_URL}/{{file_id}}", self.retrieve, methods=["GET"]),
            Route(f"{FILES_URL}/{{file_id}}", self.delete, methods=["DELETE"]),
            Route(f"{FILES_URL}/{{file_id}}/content", self.content, methods=["GET"]),
        ]

    async def create(self, request: Request) -> JSONResponse:
        """Take a file."""
        upload = Upload(self._shelf, self._places, self._most_bytes, self._silence_s)
        status = CLIENT_CLOSED
        try:
            who = await self._doorman.tenant_client()
            file = await upload.receive(request, who.tenant)
            status = 200
        except Problem as problem:
            status = problem.status
            raise
        except PenstockError as error:
            status = of_error(error).status
            raise
        finally:
            self._metrics.uploads.labels(str(status)).inc()
        self._metrics.upload_bytes.inc(file.bytes)
        return JSONResponse(shown(file))

    async def list_files(self, request: Request) -> Response:
        """List files, the newest first."""
        who = await self._doorman.tenant_client()
        query = checked_query(request.query_params, ("after", "limit", "order", "purpose"))
        limit = read_limit(query, MOST_LISTED, MOST_LISTED)
        order = one_of(query, "order", ("desc", "asc"))
        purpose = query.get("purpose", "")

        def page_of(after: str, most: int) -> Awaitable[tuple[list[pb.File], bool]]:
            return self._shelf.files(after, most, order == "asc", purpose)

        listing = Listing(page_of, _name_of, _size_of, read_after(query, "file-"), limit, LISTED_AT_ONCE)
        return sent(self._pages, who.tenant, self._vigil, listing, shown)

    async def retrieve(self, request: Request) -> JSONResponse:
        """Describe a file."""
        file = await self._file(request)
        if file.view:
            act_for(file.tenant)  # as for its content
            with suppress(NotFound, DamagedError):
                batch, errors = await self._viewed(file)
                async with until_hangup(request.receive):
                    batch = await self._reruns.now(batch, size=errors)
                if batch.ended:
                    file.bytes = batch.counts.error_bytes if errors else batch.counts.output_bytes
        return JSONResponse(shown(file))

    async def content(self, request: Request) -> Response:
        """Send a file."""
        file = await self._file(request)
        query = checked_query(request.query_params, ("order",) if file.view else ())
        headers = {"content-type": "application/octet-stream", "x-content-type-options": "nosniff"}
        # The client may read the file. Its content is its tenant's, and so is the batch it is written from.
        act_for(file.tenant)
        if not file.view:
            headers["content-length"] = str(file.bytes)
            return Download(content_of(self._shelf, self._pages, file.tenant, file.file_id), headers, self._vigil)
        in_order = one_of(query, "order", ORDERS) == INPUT_ORDER
        try:
            batch, errors = await self._viewed(file)
        except DamagedError:
            text = f"the record of {file.view}, by which the file is written, cannot be read"
            raise Problem(500, text, "", "damaged_record", NO_RETRY) from None
        return Download(self._output.lines(batch, errors, in_order, whole=True), headers, self._vigil)

    async def delete(self, request: Request) -> JSONResponse:
        """Delete a file, and of an output the results it is written from.

        Raises Problem (404 if there is none, 409 for an input that a batch still reads).
        """
        file = await self._file(request)
        act_for(file.tenant)  # as above
        if file.view:
            with suppress(NotFound):  # of a batch that is forgotten nothing is left but the file
                await self._delete_results(file)
        elif users := await self._records.users_of(file.file_id):
            text = f"{file.file_id} is the input of {users[0]}, which has not ended"
            raise Problem(409, text, "file_id", "file_in_use")
        await self._shelf.delete(file.file_id)
        return JSONResponse({"id": file.file_id, "object": "file", "deleted": True})

    async def _file(self, request: Request) -> pb.File:
        """Return the file that the path names; raises Problem."""
        file_id = request.path_params["file_id"]
        try:
            file = await self._shelf.file(file_id)
        except PenstockError as error:
            raise unknown(error, f"there is no file {file_id[:100]!r}") from None
        if file.uploading:
            raise Problem(404, f"there is no file {file_id[:100]!r}", "", "not_found")
        return file

    async def _viewed(self, file: pb.File) -> tuple[Batch, bool]:
        """Return the batch of an output or error file, and whether it is the latter; raises NotFound."""
        batch, _ = await self._records.get(file.view)
        return batch, file.file_id == batch.error_file_name

    async def _delete_results(self, file: pb.File) -> None:
        """Delete what an output or error file is written from; raises NotFound."""
        try:
            batch, errors = await self._viewed(file)
        except DamagedError:
            batch = damaged(file.view)  # results are found by its name alone
            errors = file.file_id == batch.error_file_name
        await self._output.delete(batch, errors)


def unknown(error: PenstockError, text: str) -> Problem:
    """Return what a client is told of a name that leads nowhere; of other errors, what they are."""
    problem = of_error(error)
    if isinstance(error, NotFound) or problem.status == 400:
        return Problem(404, text, "", "not_found")
    return problem


def shown(file: pb.File) -> dict[str, Any]:
    """Return a file as OpenAI's API shows it."""
    return {
        "id": file.file_id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created_unix_ns // 1_000_000_000,
        "expires_at": file.expires_unix_ns // 1_000_000_000 or None,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def _name_of(file: pb.File) -> str:
    return file.file_id


def _size_of(file: pb.File) -> int:
    return file.ByteSize() + IN_MEMORY_BYTES


def checked_query(query: QueryParams, known: tuple[str, ...]) -> dict[str, str]:
    """Return the query's parameters; raises Problem naming one that is not `known`."""
    for name in query:
        if name not in known:
            raise Problem(400, f"{name[:80]}: there is no such parameter", name[:80], "unknown_parameter")
    return dict(query)


def read_limit(query: dict[str, str], default: int, most: int) -> int:
    """Return the parameter `limit`; raises Problem."""
    text = query.get("limit", str(default))
    if not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= most:
        raise Problem(400, f"limit: must be a whole number from 1 to {most}", "limit", "invalid_value")
    return int(text)


def read_after(query: dict[str, str], prefix: str) -> str:
    """Return the parameter `after`, an id that begins with `prefix`; empty for the first page. Raises Problem.

    The id of one that has been deleted meanwhile is a place in the list as well; what is no id is none, and would begin
    the list again without end.
    """
    after = query.get("after", "")
    if after and not after.startswith(prefix):
        raise Problem(
            400, f"after: must be an id that begins with {prefix}, got {after[:80]!r}", "after", "invalid_value"
        )
    return after


def one_of(query: dict[str, str], name: str, allowed: tuple[str, ...]) -> str:
    """Return a parameter that has one of a few values, the first of which is its default; raises Problem."""
    value = query.get(name, allowed[0])
    if value not in allowed:
        raise Problem(400, f"{name}: must be one of {', '.join(allowed)}", name, "invalid_value")
    return value
