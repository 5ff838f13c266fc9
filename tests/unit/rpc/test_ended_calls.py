"""A call that the guard ends has a status, whatever it was doing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from penstock.keys import Role
from services.auth.guard import Guard, Right
from services.auth.keyring import Keyring
from services.rpc.strict import Context, Doorkeeper, _Door, _to_many
from tests.support.keyed import Keyfile


class AbortedError(Exception):
    """What ends a call."""


class Stuck:
    """The context of a call whose client does not read."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.writing = asyncio.Event()
        self.status: grpc.StatusCode | None = None

    def peer(self) -> str:
        return "ipv4:192.0.2.1:1"

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.key}"),)

    async def write(self, _: object) -> None:
        self.writing.set()
        await asyncio.Event().wait()

    def set_trailing_metadata(self, _: object) -> None: ...

    async def abort(self, code: grpc.StatusCode, _: str) -> None:
        self.status = code
        raise AbortedError


async def test_a_call_that_is_ended_while_it_writes_is_told_so(tmp_path: Path) -> None:
    keyfile = Keyfile(tmp_path / "keys.toml", head="")
    context = Stuck(keyfile.put("acme", 'role = "client"'))
    keyfile.write()
    guard = Guard(Keyring(keyfile.path, lambda: 1, lambda: None), {"Method": Right(frozenset({Role.CLIENT}))})
    ended: list[str] = []

    async def answers(_: object, __: object) -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            ended.append("answers")

    async def read(_: object) -> None: ...

    handle = _to_many(answers, cast(Any, read), _Door(Doorkeeper(), guard, "Method"))
    serving = asyncio.create_task(handle(cast(Any, None), cast(Context, context)))
    watching = asyncio.create_task(guard.watch())
    await context.writing.wait()
    keyfile.tables.clear()
    keyfile.put("other", 'role = "client"')
    keyfile.write()
    with pytest.raises(AbortedError):
        await asyncio.wait_for(serving, 30)
    watching.cancel()
    assert context.status is grpc.StatusCode.UNAUTHENTICATED
    assert ended == ["answers"], "and nothing of it is left to the garbage collector"
