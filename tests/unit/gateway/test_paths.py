"""What is asked for beside an endpoint, or in another form than it takes, is told so in words."""

from __future__ import annotations

import gzip
import json

import pytest

from penstock.openai.bodies import CHAT_URL, COMPLETIONS_URL
from tests.support.asgi import get, post
from tests.unit.gateway.test_generation import CHAT, TEXT, Gateway, gateway

__all__ = ["gateway"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", f"{CHAT_URL}/"),
        ("POST", f"{COMPLETIONS_URL}/"),
        ("GET", "/v1/models/"),
        ("GET", "/v1/requests/r-0/"),
        ("GET", "/health/"),
        ("GET", "/v1/"),
    ],
)
async def test_a_slash_at_the_end_is_named_and_nobody_is_sent_elsewhere(
    gateway: Gateway, method: str, path: str
) -> None:
    """Who follows a redirect may leave body or key behind."""
    visit = post(gateway.app, path, TEXT) if method == "POST" else get(gateway.app, path)
    answer = await visit.whole()
    assert (answer.status, answer.error["code"]) == (404, "not_found")
    assert answer.error["message"] == f"there is no {path}: no path ends with a slash here"
    assert not gateway.queue.requests


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/responses"),
        ("GET", "/v1/responses/resp_1"),
        ("POST", "/v1/responses/"),
        ("POST", "/v1/embeddings"),
        ("POST", "/v1/audio/speech"),
        ("POST", "/v1/messages/count_tokens"),
        ("POST", "/v1/chat/completions/batch"),
        ("POST", "/tokenize"),
        ("GET", "/version"),
    ],
)
async def test_what_other_servers_have_is_told_from_a_wrong_base_url(gateway: Gateway, method: str, path: str) -> None:
    visit = post(gateway.app, path, TEXT) if method == "POST" else get(gateway.app, path)
    answer = await visit.whole()
    assert (answer.status, answer.error["code"]) == (404, "not_found")
    assert answer.error["message"] == f"this gateway does not serve {path}: it answers {CHAT_URL} and {COMPLETIONS_URL}"


@pytest.mark.parametrize("path", ["/responses", "/v1/v1/responses", "/v1/responsesx", "/chat/completions"])
async def test_another_path_is_no_path(gateway: Gateway, path: str) -> None:
    assert (await post(gateway.app, path, TEXT).whole()).error["message"] == f"there is no {path}"


async def test_the_root_has_no_other_name(gateway: Gateway) -> None:
    assert (await get(gateway.app, "/").whole()).error["message"] == "there is no /"


async def test_a_compressed_body_is_refused_by_its_header(gateway: Gateway) -> None:
    body = gzip.compress(json.dumps(CHAT).encode())
    refused = await post(gateway.app, CHAT_URL, body, content_encoding="gzip").whole()
    assert (refused.status, refused.error["code"]) == (415, "unsupported_media")
    assert (refused.error["param"], refused.headers["accept-encoding"]) == ("content-encoding", "identity")
    assert "'gzip'" in refused.error["message"]
    assert (await post(gateway.app, CHAT_URL, CHAT, content_encoding="Identity").whole()).status == 200
