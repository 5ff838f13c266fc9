"""The console's page, its data and its actions, over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import asdict
from importlib.resources import files
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock.client import Client
from penstock.credentials import acting_for, pass_on
from penstock.errors import PenstockError, Unavailable
from penstock.live.timeline import timeline_of
from penstock.queue.v1 import queue_pb2
from services.gateway.console.guard import HEADERS, check_host, check_same_origin
from services.gateway.console.lookout import Lookout
from services.gateway.doorman import Doorman, authorization_of, bearer_of
from services.gateway.group import Group
from services.gateway.intake import Intake
from services.gateway.problem import Problem, of_error

ACTION_S = 5.0
"""Longest wait for a service to act: longer, and whoever pressed the button believes that it did nothing."""

MOST_NAMED = 16
"""Requests named in place of the name that stands for them."""

PAGE = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/console/console.css": ("console.css", "text/css; charset=utf-8"),
    "/console/console.js": ("console.js", "text/javascript; charset=utf-8"),
    "/console/icon.svg": ("icon.svg", "image/svg+xml"),
}

BROWSERS = 'Basic realm="penstock: an operator\'s API key as the password", charset="UTF-8"'
"""Has a browser ask for name and password; the name does not matter.

Of the page alone. For data that its script asks for a browser would ask too, but take the question back when the script
waits no longer: the script opens the page again instead.
"""

QUEUE_AWAY = "queue_unavailable"

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]


class Console:
    """Answers the console's page."""

    def __init__(
        self, client: Client, lookout: Lookout, intake: Intake, names: Collection[str], doorman: Doorman
    ) -> None:
        """Show what `lookout` sees and act through `client`, for pages served under an address or one of `names`.

        Where there are keys, `doorman` lets in operators: a browser asks for the key as for a password, and sends it
        with everything that the page asks for (RFC 7617). No cookie or session is kept anywhere.
        """
        self._client = client
        self._lookout = lookout
        self._intake = intake
        self._doorman = doorman
        self._names = frozenset(name.lower() for name in names)
        page = files(__package__) / "page"
        self._files = {path: ((page / name).read_bytes(), kind) for path, (name, kind) in PAGE.items()}

    def routes(self) -> list[Route]:
        """Return the routes of page, data and actions."""
        looks = {"/console/state": self._state, "/console/requests/{request_id}": self._request}
        acts = {"/console/drain": self._drain, "/console/undrain": self._undrain, "/console/requeue": self._requeue}
        return [
            *(Route(path, self._page) for path in PAGE),
            *(Route(path, self._looked(handler)) for path, handler in looks.items()),
            *(Route(path, self._acted(handler), methods=["POST"]) for path, handler in acts.items()),
        ]

    def _looked(self, handler: Handler) -> Handler:
        async def look(request: Request) -> Response:
            check_host(request.headers, self._names)
            await self._let_in(request)
            response = await handler(request)
            response.headers.update(HEADERS)
            return response

        return look

    def _acted(self, handler: Handler) -> Handler:
        async def act(request: Request) -> Response:
            check_same_origin(request.headers)
            return await handler(request)

        return self._looked(act)

    async def _let_in(self, request: Request) -> None:
        """Raise Problem unless an operator asks."""
        pass_on(bearer_of(authorization_of(request.scope)))
        await told("queue", self._doorman.operator())

    async def _page(self, request: Request) -> Response:
        """Return a file of the page.

        Also to somebody who cannot be asked for a key because the queue is away: these files tell nothing of the fleet.
        The page says then what is wrong, and has the browser ask for the key when the queue is back.
        """
        check_host(request.headers, self._names)
        try:
            await self._let_in(request)
        except Problem as problem:
            if problem.status == 401:
                problem.headers["www-authenticate"] = BROWSERS
            if problem.error["code"] != QUEUE_AWAY:
                raise
        content, kind = self._files[request.url.path]
        return Response(content, media_type=kind, headers=HEADERS)

    async def _state(self, _request: Request) -> Response:
        # One reading for everybody who looks, so nobody's in particular.
        with acting_for():
            state = await self._lookout.state()
        return Response(state, media_type="application/json")

    async def _request(self, request: Request) -> Response:
        name = request.path_params["request_id"]
        group = Group.named(name)
        if group is not None:
            raise Problem(404, await self._stands_for(group), "request_id", "not_found")
        asked = queue_pb2.GetRequest(request_id=name)
        return JSONResponse(asdict(timeline_of(await told("queue", self._client.wire_get(asked)))))

    async def _stands_for(self, group: Group) -> str:
        """Return what is said of the name of several requests: each has a timeline of its own."""
        keys = (queue_pb2.IdempotencyKey(key=group.key(prompt)) for prompt in range(min(group.count, MOST_NAMED)))
        gets = (self._client.wire_get(queue_pb2.GetRequest(idempotency_key=key)) for key in keys)
        text = f"it stands for {group.count} requests, one for each prompt"
        answers = await asyncio.gather(*(told("queue", get) for get in gets), return_exceptions=True)
        found = [answer for answer in answers if not isinstance(answer, BaseException)]
        for failure in answers:
            if isinstance(failure, BaseException) and not (isinstance(failure, Problem) and failure.status == 404):
                raise failure
        if not found:
            return f"{text}, whose names this key cannot see or that are gone"
        more = f", and {group.count - len(found)} more" if len(found) < group.count else ""
        return f"{text}; look for {', '.join(one.request_id for one in found)}{more}"

    async def _drain(self, request: Request) -> Response:
        worker = _text(await self._read(request), "worker")
        left = await told("scheduler", self._client.drain_worker(worker))
        self._lookout.changed()
        return JSONResponse({"worker": worker, "reservations": left})

    async def _undrain(self, request: Request) -> Response:
        worker = _text(await self._read(request), "worker")
        await told("scheduler", self._client.undrain_worker(worker))
        self._lookout.changed()
        return JSONResponse({"worker": worker})

    async def _requeue(self, request: Request) -> Response:
        request_id = _text(await self._read(request), "request_id")
        requeued = await told("queue", self._client.requeue(request_id))
        self._lookout.changed()
        if requeued.not_dead:
            raise Problem(404, f"{request_id[:200]} is no dead letter any more", "request_id", "not_found")
        return JSONResponse({"request_id": request_id})

    async def _read(self, request: Request) -> dict[str, Any]:
        return await self._intake.read(request.headers, request.receive)


async def told(who: str, asking: Awaitable[T]) -> T:
    """Return what the service `who` answers; raises Problem in words for a person."""
    try:
        async with asyncio.timeout(ACTION_S):
            return await asking
    except TimeoutError:
        raise Problem(503, f"the {who} does not answer", "", f"{who}_unavailable") from None
    except Unavailable as error:
        raise Problem(503, f"the {who} does not answer: {error}", "", f"{who}_unavailable") from None
    except PenstockError as error:
        raise of_error(error) from None


def _text(body: dict[str, Any], name: str) -> str:
    """Return the only field of `body`; raises Problem if it is not a text called `name`."""
    if body.keys() != {name} or not isinstance(body[name], str) or not body[name]:
        raise Problem(400, f"the body must be {{{name!r}: a text}}", name, "invalid_value")
    found: str = body[name]
    return found
