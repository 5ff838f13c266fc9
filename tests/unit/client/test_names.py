"""A wrong name in a call is refused by its field's name before anything is sent."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

import penstock

Call = Callable[[penstock.Client, Any], Awaitable[object]]


async def _watched(client: penstock.Client, **options: Any) -> None:
    async for _ in client.watch(**options):
        pass


ONE_NAME: dict[str, tuple[str, Call]] = {
    "get": ("request_id", lambda client, name: client.get(name)),
    "get by key": ("idempotency_key", lambda client, name: client.get(idempotency_key=name)),
    "get by key, tenant": ("tenant", lambda client, name: client.get(idempotency_key="k", tenant=name)),
    "result": ("request_id", lambda client, name: client.result(name)),
    "cancel": ("request_ids[1]", lambda client, name: client.cancel("r-1", name)),
    "cancel a batch": ("batch", lambda client, name: client.cancel(batch=name)),
    "delete": ("request_ids[0]", lambda client, name: client.delete(name)),
    "delete a batch": ("batch", lambda client, name: client.delete(batch=name)),
    "requeue": ("request_ids[0]", lambda client, name: client.requeue(name)),
    "watch": ("request_ids[1]", lambda client, name: _watched(client, request_ids=["r-1", name])),
    "watch a batch": ("batch", lambda client, name: _watched(client, batch=name)),
    "drain": ("worker_id", lambda client, name: client.drain_worker(name)),
    "undrain": ("worker_id", lambda client, name: client.undrain_worker(name)),
}
WRONG: dict[str, tuple[object, str]] = {
    "a number": (5, "is no text but int"),
    "bytes": (b"r-1", "is no text but bytes"),
    "no UTF-8": ("\ud800", "is no UTF-8"),
    "too long": ("x" * 513, "513 bytes; at most 512 are allowed"),
}


@pytest.fixture
async def nobody() -> penstock.Client:
    """Return a client of services that are not there: what is not refused fails as unavailable."""
    return penstock.Client("127.0.0.1:1", "127.0.0.1:1", retry_for_s=0)


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("call", ONE_NAME)
async def test_what_is_no_name_is_refused(nobody: penstock.Client, call: str, wrong: str) -> None:
    field, make = ONE_NAME[call]
    name, reason = WRONG[wrong]
    async with nobody as client:
        with pytest.raises(penstock.InvalidRequest) as refused:
            await make(client, name)
    assert str(refused.value).startswith(f"{field}: {reason}")
    assert refused.value.param == field


async def test_one_name_is_not_taken_for_a_list_of_letters(nobody: penstock.Client) -> None:
    async with nobody as client:
        with pytest.raises(penstock.InvalidRequest, match=r"^request_ids: is one name; give a list of them$"):
            await _watched(client, request_ids="r-1")
        with pytest.raises(penstock.InvalidRequest, match=r"^request_ids: is no list but int$"):
            await _watched(client, request_ids=cast("Any", 7))


@pytest.mark.parametrize("cursor", [-1, 2**64, "7", None, 1.5])
async def test_what_is_no_cursor_is_refused(nobody: penstock.Client, cursor: object) -> None:
    async with nobody as client:
        with pytest.raises(penstock.InvalidRequest, match=r"^cursor: must be a whole number from 0 to ") as refused:
            await _watched(client, batch="b", cursor=cursor)
    assert refused.value.param == "cursor"
