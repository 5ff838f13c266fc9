"""The gateway's endpoints put together as one ASGI application."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock.credentials import acting_for
from penstock.errors import PenstockError
from penstock.openai.bodies import CHAT_URL, COMPLETIONS_URL
from services.gateway.doorman import PassOn
from services.gateway.generation import Generation, Parts
from services.gateway.intake import ClientGoneError
from services.gateway.limits import CLIENT_CLOSED, RETRY_AFTER_S
from services.gateway.problem import Problem, of_error
from services.gateway.requests import Requests
from services.gateway.served import View
from services.gateway.stopping import Stopping

log = logging.getLogger(__name__)

ELSEWHERE = (
    "/classify", "/detokenize", "/docs", "/load", "/openapi.json", "/ping", "/pooling", "/rerank", "/score",
    "/tokenize", "/v1/assistants", "/v1/audio", f"{CHAT_URL}/batch", "/v1/conversations", "/v1/embeddings",
    "/v1/fine_tuning", "/v1/images", "/v1/messages", "/v1/moderations", "/v1/realtime", "/v1/rerank", "/v1/responses",
    "/v1/score", "/v1/threads", "/v1/uploads", "/v1/vector_stores", "/v1/videos", "/version",
)  # fmt: skip
"""Paths of OpenAI's API, of Anthropic's and of `vllm serve` that are not served here, and all below them: who asks for
one has the right base URL."""

HEALTH_S = 2.0
"""Longest wait for the queue's sign of life."""


class Front:
    """Everything a client can ask of a gateway besides generations."""

    def __init__(self, parts: Parts) -> None:
        """Answer from `parts`."""
        self._parts = parts
        self._started_s = int(time.time())
        self.draining = False

    async def models(self, _request: Request) -> JSONResponse:
        """List every name that a connected worker answers to."""
        await self._parts.doorman.tenant_client()
        view = await self._parts.served.view()
        cards = [self._card(name, model, view) for name, model in sorted(view.names.items())]
        return JSONResponse({"object": "list", "data": cards})

    async def model(self, request: Request) -> JSONResponse:
        """Describe one model; raises Problem (404) if nobody serves it, HTTPException (404) for what is no name."""
        await self._parts.doorman.tenant_client()
        name = request.path_params["name"]
        if not name:
            raise HTTPException(404)
        view = await self._parts.served.view()
        model = view.names.get(name)
        if model is None:
            raise Problem(404, f"The model `{name[:200]}` does not exist.", "model", "model_not_found")
        return JSONResponse(self._card(name, model, view))

    async def health(self, _request: Request) -> JSONResponse:
        """Say whether generations are taken; raises Problem (503) while stopping or without a queue."""
        if self.draining:
            raise Problem(503, "the gateway is stopping", "", "gateway_stopping")
        try:
            async with asyncio.timeout(HEALTH_S):
                with acting_for():
                    await self._parts.client.stats()
        except (PenstockError, TimeoutError):
            retry = {"retry-after": str(RETRY_AFTER_S)}
            raise Problem(503, "the queue does not answer", "", "queue_unavailable", retry) from None
        return JSONResponse({"status": "ok"})

    async def live(self, _request: Request) -> JSONResponse:
        """Say that the process answers, whatever the queue does: a restart mends nothing else."""
        return JSONResponse({"status": "ok"})

    async def metrics(self, _request: Request) -> Response:
        """Return the metrics as Prometheus reads them."""
        return Response(generate_latest(self._parts.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    def _card(self, name: str, model: str, view: View) -> dict[str, object]:
        is_adapter = name in view.adapters
        return {
            "id": name,
            "object": "model",
            "created": self._started_s,
            "owned_by": "penstock",
            "root": name if is_adapter else model,
            "parent": model if is_adapter else None,
            "max_model_len": view.windows.get(model) or None,
        }


def make_app(parts: Parts, front: Front, more: Sequence[Route] = ()) -> Starlette:
    """Return the application, with `more` endpoints than those for generations."""
    requests = Requests(parts.client, parts.pages, parts.doorman, parts.vigil)
    routes = [
        # Classes that are ASGI applications themselves: they need the client's hang-up and late response headers.
        Route(CHAT_URL, Generation(CHAT_URL, parts), methods=["POST"]),
        Route(COMPLETIONS_URL, Generation(COMPLETIONS_URL, parts), methods=["POST"]),
        Route("/v1/models", front.models),
        Route("/v1/models/{name:path}", front.model),
        Route("/v1/requests/{request_id}", requests.get),
        Route("/v1/requests/{request_id}", requests.delete, methods=["DELETE"]),
        Route("/health", front.health),
        Route("/live", front.live),
        Route("/metrics", front.metrics),
        *more,
    ]
    handlers = {
        Problem: _problem,
        PenstockError: _penstock,
        ClientGoneError: _gone,
        HTTPException: _http,
        Exception: _failed,
    }
    app = Starlette(routes=routes, exception_handlers=handlers, middleware=[Middleware(PassOn), Middleware(Stopping)])
    # A client that follows would leave its body or its key behind; behind a proxy, go to another scheme or host.
    app.router.redirect_slashes = False
    return app


async def _problem(_request: Request, problem: Exception) -> JSONResponse:
    assert isinstance(problem, Problem)
    return JSONResponse(problem.body, problem.status, problem.headers)


async def _penstock(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, PenstockError)
    return await _problem(request, of_error(error))


async def _gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED)  # to nobody


async def _http(request: Request, error: Exception) -> JSONResponse:
    """Answer what the router refuses."""
    assert isinstance(error, HTTPException)
    known = error.status_code == 405
    text = f"{request.method} is not answered here" if known else _no_such(request.url.path)
    code = "method_not_allowed" if known else "not_found"
    return await _problem(request, Problem(error.status_code, text, "", code, error.headers))


def _no_such(path: str) -> str:
    """Return what is said of a path that is not served."""
    if any(f"{path}/".startswith(f"{elsewhere}/") for elsewhere in ELSEWHERE):
        return f"this gateway does not serve {path[:200]}: it answers {CHAT_URL} and {COMPLETIONS_URL}"
    hint = ": no path ends with a slash here" if path.endswith("/") and path != "/" else ""
    return f"there is no {path[:200]}{hint}"


async def _failed(request: Request, error: Exception) -> JSONResponse:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return await _problem(request, Problem(500, "the gateway failed", "", "internal_error"))
