"""Lets calls in or not: who makes each, whether its role may, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc

from penstock.credentials import AUTHORIZATION, TENANT
from penstock.keys import DEFAULT_TENANT, NAME, ApiKey, Role
from services.auth.caller import CALLER, Caller, open_caller
from services.auth.keyring import Keyring, NotAllowedError, Reason
from services.rpc.interruption import Interruption

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

POLL_S = 0.5
"""Between two looks at the keys file and at the open calls: what a revocation may be late by, besides the time that a
changed file takes to parse."""

DENIALS = frozenset({Reason.ROLE, Reason.TENANT, Reason.CHANNEL})
"""Reasons that concern a good key: PERMISSION_DENIED. The others are UNAUTHENTICATED."""


@dataclass(frozen=True, slots=True)
class Right:
    """Who may call a method."""

    roles: frozenset[Role]
    for_tenant: bool = False
    """Whether a service must say for which tenant: the method is a client's."""
    submits: bool = False
    """Whether a call submits for as long as it is open: it then ends when other channels are its caller's."""


EVERYONE = frozenset(Role)


@dataclass(frozen=True, slots=True)
class Certificate:
    """A verified client certificate that is a service's."""

    common_name: str


class _OverError(Exception):
    """An open call may not go on."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True, slots=True, eq=False)
class _OpenCall:
    """One call that is being served, and what let it in."""

    interruption: Interruption
    credential: ApiKey | Certificate
    caller: Caller
    submits: bool


class Guard:
    """Knows who calls. Without a keyring everyone is let in, for any tenant."""

    def __init__(
        self,
        keyring: Keyring | None = None,
        rights: Mapping[str, Right] | None = None,
        count_refusal: Callable[[Reason], None] = lambda _: None,
    ) -> None:
        """Check keys against `keyring` and roles against `rights`, by method; one that is not there nobody may call."""
        self._keyring = keyring
        self._rights = rights or {}
        self._count = count_refusal
        self._calls: set[_OpenCall] = set()
        self.on_change: Callable[[], None] = lambda: None
        """Called when the keys file says something else."""

    @asynccontextmanager
    async def admit(self, method: str, context: Context) -> AsyncIterator[None]:
        """Set CALLER for a call while it is served. Ends the call if it may not be made, or not any more."""
        try:
            if self._keyring is None:
                CALLER.set(open_caller(_acts_for(_metadata(context))))
                yield
                return
            caller, credential = self._known(self._keyring, method, context)
        except NotAllowedError as error:
            await self.refuse(error, context)
        CALLER.set(caller)
        call = _OpenCall(Interruption(), credential, caller, self._rights[method].submits)
        self._calls.add(call)
        try:
            with call.interruption:
                yield
        except _OverError as over:
            await context.abort(over.code, str(over))
        finally:
            self._calls.discard(call)

    async def refuse(self, error: NotAllowedError, context: Context) -> None:
        """End a call with the status of a refusal, and count it."""
        self._count(error.reason)
        denied = error.reason in DENIALS
        code = grpc.StatusCode.PERMISSION_DENIED if denied else grpc.StatusCode.UNAUTHENTICATED
        await context.abort(code, str(error))

    async def watch(self) -> None:
        """Follow the keys file, for ever, and end calls whose key is no longer good, or whose channels changed."""
        while self._keyring is None:
            await asyncio.Event().wait()
        while True:
            if await self._keyring.refresh():
                self.on_change()
            for call in self._calls:
                if (over := self._over(self._keyring, call)) is not None:
                    call.interruption.end(over)
            await asyncio.sleep(POLL_S)

    def _over(self, keyring: Keyring, call: _OpenCall) -> _OverError | None:
        """Return why an open call may not go on, None if it may."""
        if not self._holds(keyring, call.credential):
            return _OverError(grpc.StatusCode.UNAUTHENTICATED, "the API key is no longer good for this call")
        if call.submits and call.caller.channels != _channels(keyring, call):
            return _OverError(grpc.StatusCode.UNAVAILABLE, "the caller's channels have changed; call again")
        return None

    def _holds(self, keyring: Keyring, credential: ApiKey | Certificate) -> bool:
        if isinstance(credential, Certificate):
            return credential.common_name in keyring.keys.service_certificates
        return keyring.holds(credential)

    def _known(self, keyring: Keyring, method: str, context: Context) -> tuple[Caller, ApiKey | Certificate]:
        """Return who calls and what proves it; raises NotAllowedError."""
        metadata = _metadata(context)
        authorization = metadata.get(AUTHORIZATION)
        credential: ApiKey | Certificate
        if authorization is not None:
            # Also if the connection has a service's certificate: the call is somebody else's, whom the service serves.
            credential = keyring.authenticate(authorization)
            role = credential.role
        else:
            credential = _certificate(keyring, context)
            role = Role.SERVICE
        right = self._rights.get(method)
        if right is None or role not in right.roles:
            wanted = " or ".join(sorted(right.roles)) if right else "none"
            raise NotAllowedError(Reason.ROLE, f"{method} needs the role {wanted}; the caller's is {role}")
        caller = _caller(keyring, credential, role, _acts_for(metadata))
        if role is Role.SERVICE and right.for_tenant and caller.sees is None:
            raise NotAllowedError(Reason.TENANT, f"{TENANT}: a service says for which tenant it calls {method}")
        return caller, credential


def _caller(keyring: Keyring, credential: ApiKey | Certificate, role: Role, acts_for: str) -> Caller:
    key_id = credential.key_id if isinstance(credential, ApiKey) else ""
    if role is Role.SERVICE:
        limits = keyring.keys.tenant(acts_for)
        return Caller(role, acts_for or DEFAULT_TENANT, acts_for or None, limits.channels, key_id)
    if acts_for:
        raise NotAllowedError(Reason.TENANT, f"{TENANT}: only a service acts for a tenant")
    assert isinstance(credential, ApiKey), "a certificate is a service's"
    sees = None if role is Role.OPERATOR else credential.tenant
    return Caller(role, credential.tenant, sees, keyring.keys.channels_of(credential), key_id)


def _channels(keyring: Keyring, call: _OpenCall) -> frozenset[str] | None:
    """Return the channels that the caller of an open call may submit to now, if its credential is good; None: all."""
    if call.caller.role is not Role.SERVICE and isinstance(call.credential, ApiKey):
        return keyring.keys.channels_of(keyring.keys.keys[call.credential.key_id])
    return keyring.keys.tenant(call.caller.sees or "").channels


def _certificate(keyring: Keyring, context: Context) -> Certificate:
    """Return the service's certificate of a connection; raises NotAllowedError."""
    # There is a name only where the handshake asked for a certificate and verified it.
    for name in context.auth_context().get("x509_common_name", ()):
        if name.decode(errors="replace") in keyring.keys.service_certificates:
            return Certificate(name.decode(errors="replace"))
    raise NotAllowedError(Reason.MISSING, "an API key is needed: authorization: Bearer KEY")


def _acts_for(metadata: Mapping[str, str]) -> str:
    """Return the tenant that a call names, empty if none; raises NotAllowedError."""
    tenant = metadata.get(TENANT, "")
    if tenant and not NAME.fullmatch(tenant):
        raise NotAllowedError(Reason.TENANT, f"{TENANT}: must be 1 to 64 letters, digits, dashes and underscores")
    return tenant


def _metadata(context: Context) -> dict[str, str]:
    return {name: value for name, value in context.invocation_metadata() or () if isinstance(value, str)}
