"""The keys file of a running service: read at the start, and again when it changes."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from pathlib import Path

from penstock.keys import ApiKey, Keys, KeysError, digest, key_id_of, parse

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 16 * 1024 * 1024
"""Of a keys file: some 100,000 keys. A wrong path must not fill the memory."""

NO_DIGEST = bytes(32)
"""Compared with where there is no key of that name, so that the time tells nobody which names there are."""


class Reason(StrEnum):
    """Why a call was refused; a label of the metric."""

    MISSING = "missing"
    UNKNOWN = "unknown"
    REVOKED = "revoked"
    EXPIRED = "expired"
    ROLE = "role"
    TENANT = "tenant"
    CHANNEL = "channel"


class NotAllowedError(Exception):
    """A call may not be made."""

    def __init__(self, reason: Reason, text: str) -> None:
        """Refuse for `reason`, and tell the caller `text`, which never quotes what it sent."""
        super().__init__(text)
        self.reason = reason


class Keyring:
    """What the file said when it was last good."""

    def __init__(self, path: Path, now_ns: Callable[[], int], count_error: Callable[[], None]) -> None:
        """Read the file at `path`; raises KeysError. `count_error` is called when it cannot be read again later."""
        self._path = path
        self._now_ns = now_ns
        self._count_error = count_error
        self._stamp: tuple[int, int, int] | None = self._stamped()
        self._trouble = ""
        """What was wrong with the file when it was last looked at, said once."""
        self._refused = (b"", "")
        """SHA-256 of what was last read and is no keys file, and why not."""
        self.keys: Keys = self._read()

    async def refresh(self) -> bool:
        """Read the file again if it has changed; return whether it says something else now.

        One that is damaged or gone is counted, and what was good stays in force: a slip of the editor must neither lock
        everybody out nor let anybody in. A file of many keys takes a second to parse: a thread does it meanwhile. To be
        called again only once it has returned.
        """
        try:
            stamp = self._stamped()
            if stamp == self._stamp:
                return False
            keys, changed = await asyncio.to_thread(self._read_again)
            self._stamp = stamp
            self._trouble = ""
        except KeysError as error:
            self._stamp = None  # to be read again also if nothing more changes: what is wrong may be the reading
            if self._trouble != str(error):
                self._trouble = str(error)
                self._count_error()
                log.error("the keys stay as they were: %s", error)
            return False
        self.keys = keys
        if changed:
            log.info("%s: %d keys of %d tenants are in force", self._path, len(keys.keys), len(keys.tenants))
        return changed

    @property
    def is_refused(self) -> bool:
        """Whether the file, as it was last looked at, is none to go by. Any thread may ask."""
        return bool(self._trouble)

    def authenticate(self, authorization: str) -> ApiKey:
        """Return the key in an Authorization header; raises NotAllowedError."""
        scheme, _, given = authorization.partition(" ")
        given = given.strip()
        if scheme.lower() != "bearer" or not given:
            raise NotAllowedError(Reason.MISSING, "an API key is needed: authorization: Bearer KEY")
        key = self.keys.keys.get(key_id_of(given))
        same = hmac.compare_digest(digest(given), NO_DIGEST if key is None else key.sha256)
        if key is None or not same:
            raise NotAllowedError(Reason.UNKNOWN, "the API key is not known here")
        if key.revoked:
            raise NotAllowedError(Reason.REVOKED, "the API key has been revoked")
        if key.expired(self._now_ns()):
            raise NotAllowedError(Reason.EXPIRED, "the API key has expired")
        return key

    def holds(self, key: ApiKey) -> bool:
        """Whether a key that was good still is the same one, and its time, as the file says it now, is not over.

        It may have other channels meanwhile (`Keys.channels_of` the key that the file has now).
        """
        now = self.keys.keys.get(key.key_id)
        return now is not None and (now == key or _lasting(now) == _lasting(key)) and not now.expired(self._now_ns())

    def _stamped(self) -> tuple[int, int, int]:
        try:
            found = os.stat(self._path)
        except OSError as error:
            raise KeysError(f"keys file {self._path}: {error.strerror}") from None
        return found.st_mtime_ns, found.st_ino, found.st_size

    def _read_again(self) -> tuple[Keys, bool]:
        """Return what the file says, and whether that is something else than before; raises KeysError."""
        keys = self._read()
        return keys, keys != self.keys

    def _read(self) -> Keys:
        """Return what the file says; raises KeysError, for what was refused before without parsing it again."""
        content = self._content()
        sha256 = hashlib.sha256(content).digest()
        if sha256 == self._refused[0]:
            raise KeysError(self._refused[1])
        try:
            return parse(content.decode())
        except UnicodeDecodeError as error:
            text = f"keys file {self._path}: is not UTF-8 at byte {error.start}"
        except KeysError as error:
            text = f"keys file {self._path}: {error}"
        self._refused = (sha256, text)
        raise KeysError(text)

    def _content(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                content = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise KeysError(f"keys file {self._path}: {error.strerror}") from None
        if len(content) > MAX_FILE_BYTES:
            raise KeysError(f"keys file {self._path}: is larger than {MAX_FILE_BYTES} bytes")
        return content


def _lasting(key: ApiKey) -> ApiKey:
    """Return of a key what cannot change without making it another one."""
    return replace(key, channels=None, expires_ns=0)
