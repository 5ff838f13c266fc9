"""`/v1/batches`: files of requests that outlive every gateway."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock.client import Client
from penstock.credentials import act_for, acting_for
from penstock.errors import PenstockError
from penstock.keys import DEFAULT_TENANT
from penstock.names import BATCH_CHANNEL
from penstock.openai.bodies import MODELS
from penstock.queue.v1 import queue_pb2
from services.gateway.batch.output import Output
from services.gateway.batch.records import BatchRecords, DamagedError, damaged, new_batch_id
from services.gateway.batch.reruns import Reruns
from services.gateway.core.batch import Batch, Event, MoveError, Status
from services.gateway.doorman import Doorman
from services.gateway.expiry import read_expiry
from services.gateway.extras import DEADLINE, KEEP, Extras, read_extras
from services.gateway.files import checked_query, read_after, read_limit, unknown
from services.gateway.hangup import until_hangup
from services.gateway.intake import Intake
from services.gateway.limits import TELLING
from services.gateway.listing import Listing, sent
from services.gateway.pages import Pages
from services.gateway.problem import Problem
from services.gateway.shelf import Shelf
from services.gateway.upload import PURPOSE
from services.gateway.vigil import Vigil

BATCHES_URL = "/v1/batches"

FIELDS = ("input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after")

WINDOW = re.compile(r"([1-9][0-9]{0,5})([smhd])")
UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
MOST_WINDOW_S = 7 * 86_400
"""A week: results are kept no longer unless the queue is told to."""

MAX_PAIRS, MAX_NAME, MAX_VALUE = 16, 64, 512
"""Of metadata, as OpenAI allows."""

PAGE_DEFAULT, PAGE_MOST = 20, 100
"""Of a list, as OpenAI has them."""

LISTED_AT_ONCE = 10
"""Batches read at once for it: most take a kilobyte, and one whose lines were refused up to a MiB."""


class Batches:
    """Serves batches; the drivers do the work."""

    def __init__(
        self,
        client: Client,
        shelf: Shelf,
        records: BatchRecords,
        output: Output,
        intake: Intake,
        pages: Pages,
        vigil: Vigil,
        doorman: Doorman,
        wake: Callable[[], None],
    ) -> None:
        """Put batches into `records`, and `wake` the driver of this gateway for each; lists are held among `pages`."""
        self._client = client
        self._shelf = shelf
        self._records = records
        self._intake = intake
        self._pages = pages
        self._vigil = vigil
        self._doorman = doorman
        self._wake = wake
        self._reruns = Reruns(output, records)

    def routes(self) -> list[Route]:
        """Return the endpoints."""
        return [
            Route(BATCHES_URL, self.create, methods=["POST"]),
            Route(BATCHES_URL, self.list_batches, methods=["GET"]),
            Route(f"{BATCHES_URL}/{{batch_id}}", self.retrieve, methods=["GET"]),
            Route(f"{BATCHES_URL}/{{batch_id}}/cancel", self.cancel, methods=["POST"]),
        ]

    async def create(self, request: Request) -> JSONResponse:
        """Begin a batch."""
        who = await self._doorman.tenant_client()
        extras = _extras(request)
        body = await self._intake.read(request.headers, request.receive, who.tenant)
        batch = new_batch(body, extras, int(time.time()), who.tenant)
        await self._check_file(batch.input_file_id, who.tenant)
        batch = replace(batch, channel=await self._channel(batch.channel, who))
        with acting_for(who.tenant):
            await self._records.add(batch)
        self._wake()
        return JSONResponse(batch.to_object())

    async def _check_file(self, file_id: str, tenant: str) -> None:
        """Raise Problem if there is no such input of this tenant's, for whom it will be read: operators see all."""
        try:
            file = await self._shelf.file(file_id)
        except PenstockError as error:
            problem = unknown(error, "")
            if problem.status != 404:
                raise problem from None
            file = None
        if file is None or file.uploading or (file.purpose, file.tenant) != (PURPOSE, tenant):
            text = f"input_file_id: there is no file {file_id[:100]!r} with purpose {PURPOSE!r}"
            raise Problem(400, text, "input_file_id", "invalid_value")

    async def _channel(self, named: str, who: queue_pb2.IdentifyResponse) -> str:
        """Return where the lines are to wait, which the queue says where nobody named it; raises Problem."""
        stats = await self._client.stats()
        channel = named or stats.batch_channel or BATCH_CHANNEL  # an older queue says nothing
        if not who.all_channels and channel not in who.channels:
            text = f"x-penstock-channel: {channel[:80]!r} is not for this key; it may use: {', '.join(who.channels)}"
            raise Problem(403, text, "x-penstock-channel", "permission_denied")
        known = sorted(line.channel for line in stats.channels)
        if channel not in known:
            text = f"x-penstock-channel: {channel[:80]!r} is unknown; known: {', '.join(known)}"
            raise Problem(400, text, "x-penstock-channel", "unknown_channel")
        return channel

    async def list_batches(self, request: Request) -> Response:
        """List batches, the newest first."""
        query = checked_query(request.query_params, ("after", "limit"))
        limit = read_limit(query, PAGE_DEFAULT, PAGE_MOST)
        after = read_after(query, "batch_")
        who = await self._doorman.tenant_client()
        act_for(who.tenant)
        listing = Listing(self._records.page, _name_of, _size_of, after, limit, LISTED_AT_ONCE)
        return sent(self._pages, who.tenant, self._vigil, listing, Batch.to_object, self._reruns.now)

    async def retrieve(self, request: Request) -> JSONResponse:
        """Describe a batch; raises Problem (404) if there is none."""
        batch_id = request.path_params["batch_id"]
        who = await self._doorman.tenant_client()
        try:
            with acting_for(who.tenant):
                async with until_hangup(request.receive):
                    batch = await self._reruns.now((await self._records.get(batch_id))[0])
        except DamagedError:
            batch = damaged(batch_id)
        except PenstockError as error:
            raise _no_batch(error, batch_id) from None
        return JSONResponse(batch.to_object())

    async def cancel(self, request: Request) -> JSONResponse:
        """Cancel what has not ended of a batch; its driver does the rest. Raises Problem (404; 409 if it has ended)."""
        batch_id = request.path_params["batch_id"]
        who = await self._doorman.tenant_client()
        try:
            with acting_for(who.tenant):
                batch = await self._records.change(batch_id, cancelled)
        except (MoveError, DamagedError) as error:
            raise Problem(409, f"the batch cannot be cancelled: {error}", "batch_id", "batch_not_cancellable") from None
        except PenstockError as error:
            raise _no_batch(error, batch_id) from None
        # Now, and again by the driver once it has stopped submitting.
        with acting_for(who.tenant):
            await self._client.cancel(batch=batch_id)
        self._wake()
        return JSONResponse(batch.to_object())


def cancelled(batch: Batch) -> Batch:
    """Return the batch as a client's cancel leaves it; raises MoveError. Repeating it is harmless."""
    if batch.status in {Status.CANCELLING, Status.CANCELLED}:
        return batch
    return batch.moved(Event.CANCEL, time.time())


def _name_of(batch: Batch) -> str:
    return batch.batch_id


def _size_of(batch: Batch) -> int:
    return TELLING * len(batch.to_row())


def _no_batch(error: PenstockError, batch_id: str) -> Problem:
    return unknown(error, f"there is no batch {batch_id[:100]!r}")


def _extras(request: Request) -> Extras:
    """Return the headers that mean something for a batch; raises Problem for those that mean something else."""
    extras = read_extras(request.headers.items())
    for name, given in (
        (DEADLINE, extras.deadline_ms),
        (KEEP, extras.keep),
        ("idempotency-key", extras.idempotency_key),
    ):
        if given:
            raise Problem(400, f"{name}: not supported for batches", name, "unsupported_parameter")
    return extras


def new_batch(body: dict[str, Any], extras: Extras, now_s: int, tenant: str = DEFAULT_TENANT) -> Batch:
    """Return the batch that a body asks for, its channel empty if none is named.

    Raises Problem naming the first wrong field.
    """
    for name in body:
        if name not in FIELDS:
            raise Problem(400, f"{name[:80]}: there is no such field", name[:80], "unknown_parameter")
    endpoint = _text(body, "endpoint")
    if endpoint not in MODELS:
        text = f"endpoint: must be one of {', '.join(MODELS)}, got {endpoint[:80]!r}"
        raise Problem(400, text, "endpoint", "invalid_value")
    window = _text(body, "completion_window")
    return Batch(
        batch_id=new_batch_id(),
        endpoint=endpoint,
        input_file_id=_text(body, "input_file_id"),
        completion_window=window,
        created_at=now_s,
        expires_at=now_s + window_s(window),
        channel=extras.channel,
        priority=extras.priority,
        metadata=_metadata(body.get("metadata")),
        output_expires_after_s=read_expiry("output_expires_after", body.get("output_expires_after")),
        tenant=tenant,
    )


def window_s(window: str) -> int:
    """Return the seconds of a completion window such as "24h"; raises Problem."""
    found = WINDOW.fullmatch(window)
    seconds = int(found[1]) * UNITS_S[found[2]] if found else 0
    if not 0 < seconds <= MOST_WINDOW_S:
        text = "completion_window: must be a whole number and s, m, h or d, such as '24h', and at most '7d'"
        raise Problem(400, text, "completion_window", "invalid_value")
    return seconds


def _text(body: dict[str, Any], name: str) -> str:
    value = body.get(name)
    if value is None:
        raise Problem(400, f"{name}: is missing", name, "missing_parameter")
    if not isinstance(value, str):
        raise Problem(400, f"{name}: must be a text", name, "invalid_value")
    return value


def _metadata(given: object) -> dict[str, str] | None:
    if given is None:
        return None
    if not isinstance(given, dict) or len(given) > MAX_PAIRS:
        raise Problem(400, f"metadata: must be an object of at most {MAX_PAIRS} texts", "metadata", "invalid_value")
    for name, value in given.items():
        if len(name) > MAX_NAME or not isinstance(value, str) or len(value) > MAX_VALUE:
            text = f"metadata: names have at most {MAX_NAME} characters, values are texts of at most {MAX_VALUE}"
            raise Problem(400, text, "metadata", "invalid_value")
    return given
