"""The keys file: who may call the fleet, as hashes of API keys, and what each tenant may have.

A key is drawn with 256 bits of chance, so that one SHA-256 keeps it as secret as a slow password hash would keep a
password: there is nothing to guess. The file is TOML, read by the services and written by `penstock keys`.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import re
import secrets
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from penstock.errors import PenstockError

DEFAULT_TENANT = "default"
"""Owns what is made without keys, and what a key without a tenant makes."""

PREFIX = "penstock"
SECRET_BYTES = 32
"""256 bits: what makes a plain hash enough."""

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""Of a key and of a tenant: they stand in metadata, in tables' names and between the dots of a key."""

TOP = ("service_certificates", "tenants", "keys")
TENANT_FIELDS = ("channels", "max_waiting_requests", "max_waiting_bytes")
KEY_FIELDS = ("role", "tenant", "channels", "expires", "revoked", "sha256")


class KeysError(PenstockError, ValueError):
    """A keys file says something wrong; the text names the line or the field."""


class Role(StrEnum):
    """What a key is for."""

    CLIENT = "client"
    """Submits requests, and reads and cancels its tenant's."""
    OPERATOR = "operator"
    """Does so with everybody's, and runs the fleet: drain, dead letters, backups, counts."""
    SERVICE = "service"
    """A part of the fleet: the services' streams, and calls for a tenant that it names."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key, without its secret."""

    key_id: str
    role: Role
    tenant: str = DEFAULT_TENANT
    channels: frozenset[str] | None = None
    """Channels it may submit to; None: all of its tenant's."""
    expires_ns: int = 0
    """Unix time; 0 means never."""
    revoked: bool = False
    sha256: bytes = b""

    def expired(self, now_ns: int) -> bool:
        """Whether its time is over."""
        return 0 < self.expires_ns <= now_ns


@dataclass(frozen=True, slots=True)
class Tenant:
    """What a tenant may have."""

    channels: frozenset[str] | None = None
    """Channels its keys may submit to; None: all."""
    max_waiting_requests: int | None = None
    max_waiting_bytes: int | None = None


NO_LIMITS = Tenant()


@dataclass(frozen=True, slots=True)
class Keys:
    """What a keys file says."""

    keys: Mapping[str, ApiKey] = field(default_factory=dict)
    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    service_certificates: frozenset[str] = frozenset()
    """Common names of the client certificates that are services'."""

    def tenant(self, name: str) -> Tenant:
        """Return a tenant's limits; one the file does not name has none."""
        return self.tenants.get(name, NO_LIMITS)

    def channels_of(self, key: ApiKey) -> frozenset[str] | None:
        """Return the channels a key may submit to: those that both it and its tenant may use; None: all."""
        whole = self.tenant(key.tenant).channels
        if whole is None or key.channels is None:
            return key.channels if whole is None else whole
        return key.channels & whole


def new_key(key_id: str) -> str:
    """Draw a key of this name."""
    return f"{PREFIX}.{key_id}.{secrets.token_urlsafe(SECRET_BYTES)}"


def key_id_of(text: str) -> str:
    """Return the name in a key; empty if it is none."""
    parts = text.split(".")
    return parts[1] if len(parts) == 3 and parts[0] == PREFIX and NAME.fullmatch(parts[1]) else ""


def digest(text: str) -> bytes:
    """Return the hash under which a key is kept."""
    return hashlib.sha256(text.encode(errors="surrogateescape")).digest()


def parse(text: str) -> Keys:
    """Read a keys file's text; raises KeysError."""
    try:
        found = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise KeysError(f"is not TOML: {error}") from None
    _known(found, TOP, "")
    tables = {name: _table(found.get(name, {}), name) for name in ("tenants", "keys")}
    return Keys(
        {key_id: _key(key_id, values) for key_id, values in tables["keys"].items()},
        {name: _tenant(name, values) for name, values in tables["tenants"].items()},
        _names(found.get("service_certificates", []), "service_certificates"),
    )


def _tenant(name: str, values: Any) -> Tenant:
    where = _named("tenants", name)
    values = _table(values, where)
    _known(values, TENANT_FIELDS, where)
    return Tenant(
        _names(values["channels"], f"{where}.channels") if "channels" in values else None,
        _count(values, "max_waiting_requests", where),
        _count(values, "max_waiting_bytes", where),
    )


def _key(key_id: str, values: Any) -> ApiKey:
    where = _named("keys", key_id)
    values = _table(values, where)
    _known(values, KEY_FIELDS, where)
    if values.get("role") not in tuple(Role):
        raise KeysError(f"{where}.role: must be one of {', '.join(Role)}")
    tenant = values.get("tenant", DEFAULT_TENANT)
    if not isinstance(tenant, str) or not NAME.fullmatch(tenant):
        raise KeysError(f"{where}.tenant: must be 1 to 64 letters, digits, dashes and underscores")
    if not isinstance(values.get("revoked", False), bool):
        raise KeysError(f"{where}.revoked: must be true or false")
    hashed = values.get("sha256")
    if not isinstance(hashed, str) or not re.fullmatch(r"[0-9a-f]{64}", hashed):
        raise KeysError(f"{where}.sha256: must be 64 hexadecimal digits")
    return ApiKey(
        key_id,
        Role(values["role"]),
        tenant,
        _names(values["channels"], f"{where}.channels") if "channels" in values else None,
        _time_ns(values.get("expires"), f"{where}.expires"),
        values.get("revoked", False),
        bytes.fromhex(hashed),
    )


def _named(table: str, name: str) -> str:
    if not NAME.fullmatch(name):
        raise KeysError(f"{table}: {name[:80]!r} must be 1 to 64 letters, digits, dashes and underscores")
    return f"{table}.{name}"


def _table(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise KeysError(f"{where}: must be a table")
    return value


def _known(values: Mapping[str, Any], names: tuple[str, ...], where: str) -> None:
    for name in values:
        if name not in names:
            place = f"{where}.{name}" if where else name
            raise KeysError(f"{place[:160]}: there is no such field; known: {', '.join(names)}")


def _names(value: Any, where: str) -> frozenset[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise KeysError(f"{where}: must be a list of names")
    return frozenset(value)


def _count(values: Mapping[str, Any], name: str, where: str) -> int | None:
    value = values.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise KeysError(f"{where}.{name}: must be a whole number from 0")
    return value


def _time_ns(value: Any, where: str) -> int:
    if value is None:
        return 0
    if not isinstance(value, dt.datetime) or value.tzinfo is None:
        raise KeysError(f"{where}: must be a time with its zone, such as 2030-01-01T00:00:00Z")
    seconds = int(value.timestamp())
    if seconds <= 0:  # 0 is never: a time that a slip put there must not be taken for it
        raise KeysError(f"{where}: must be 1970-01-01T00:00:01Z or later; revoked = true ends a key")
    return seconds * 1_000_000_000


# ---- changes of the text, which leave everything else in the file as its owner wrote it ----


def with_key(text: str, key: ApiKey) -> str:
    """Return the file's text with one more key; raises KeysError if there is one of this name."""
    if key.key_id in parse(text).keys:
        raise KeysError(f"keys.{key.key_id}: there is such a key already; names are never used again")
    lines = [f"[keys.{key.key_id}]", f'role = "{key.role}"', f'tenant = "{key.tenant}"']
    if key.channels is not None:
        lines.append("channels = [" + ", ".join(_quoted(name) for name in sorted(key.channels)) + "]")
    if key.expires_ns:
        when = dt.datetime.fromtimestamp(key.expires_ns // 1_000_000_000, dt.UTC)
        lines.append(f"expires = {when:%Y-%m-%dT%H:%M:%SZ}")
    lines.append(f'sha256 = "{key.sha256.hex()}"')
    before = text.rstrip("\n") + "\n\n" if text.strip() else ""
    changed = before + "\n".join(lines) + "\n"
    parse(changed)
    return changed


def with_revoked(text: str, key_id: str) -> str:
    """Return the file's text with a key revoked; raises KeysError if there is no such key."""
    key = parse(text).keys.get(key_id)
    if key is None:
        raise KeysError(f"keys.{key_id}: there is no such key")
    if key.revoked:
        return text
    without = re.sub(
        rf"(?m)(^\[keys\.{re.escape(key_id)}\][^\n]*\n(?:(?!\[).*\n)*?)revoked[ \t]*=[^\n]*\n", r"\1", text
    )
    header = re.compile(rf"^\[keys\.{re.escape(key_id)}\][^\n]*$", re.MULTILINE)
    changed = header.sub(lambda found: f"{found[0]}\nrevoked = true", without, count=1)
    if not _is_revoked(changed, key_id):
        raise KeysError(f'keys.{key_id}: is not written as a table of its own; add "revoked = true" to it by hand')
    return changed


def _is_revoked(text: str, key_id: str) -> bool:
    try:
        return parse(text).keys[key_id].revoked
    except KeysError:
        return False


def _quoted(text: str) -> str:
    """Return a TOML basic string (TOML 1.0, "String"): what it must escape JSON escapes alike, but for U+007F."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
