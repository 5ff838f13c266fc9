"""The keys file: what it may say, how `penstock keys` changes it, and what a running service makes of changes."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import threading
import tomllib
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from penstock.cli import api_keys
from penstock.keys import ApiKey, Keys, KeysError, Role, digest, new_key, parse, with_key, with_revoked
from services.auth import keyring
from services.auth.guard import Guard
from services.auth.keyring import Keyring, NotAllowedError, Reason
from services.auth.setup import AuthMetrics, keyring_of
from services.clock import SystemClock
from services.queue.settings import QueueSettings
from tests.support.fleet import penstock

HASH = f'sha256 = "{"0" * 64}"\n'
GOOD = f'[keys.a]\nrole = "client"\n{HASH}'

WRONG = [
    ("not TOML", "[keys.a\n", "line 1"),
    ("unknown table", "[key.a]\n", "key: there is no such field"),
    ("unknown field", f'[keys.a]\nrole = "client"\nadmin = true\n{HASH}', "keys.a.admin: there is no such field"),
    ("no role", f"[keys.a]\n{HASH}", "keys.a.role"),
    ("unknown role", f'[keys.a]\nrole = "root"\n{HASH}', "keys.a.role"),
    ("a key instead of its hash", '[keys.a]\nrole = "client"\nsha256 = "penstock.a.b"\n', "keys.a.sha256"),
    ("no hash", '[keys.a]\nrole = "client"\n', "keys.a.sha256"),
    ("wrong name", f'[keys."a b"]\nrole = "client"\n{HASH}', "keys: 'a b'"),
    ("wrong tenant", f'[keys.a]\nrole = "client"\ntenant = "a.b"\n{HASH}', "keys.a.tenant"),
    ("wrong channels", f'[keys.a]\nrole = "client"\nchannels = "batch"\n{HASH}', "keys.a.channels"),
    ("time without zone", f'[keys.a]\nrole = "client"\nexpires = 2030-01-01T00:00:00\n{HASH}', "keys.a.expires"),
    ("expired at 0", f'[keys.a]\nrole = "client"\nexpires = 1970-01-01T00:00:00Z\n{HASH}', "keys.a.expires"),
    ("within second 0", f'[keys.a]\nrole = "client"\nexpires = 1970-01-01T00:00:00.9Z\n{HASH}', "keys.a.expires"),
    ("before 0", f'[keys.a]\nrole = "client"\nexpires = 0001-01-01T00:00:00+23:59\n{HASH}', "keys.a.expires"),
    ("revoked how", f'[keys.a]\nrole = "client"\nrevoked = "no"\n{HASH}', "keys.a.revoked"),
    ("quota below 0", "[tenants.t]\nmax_waiting_requests = -1\n", "tenants.t.max_waiting_requests"),
    ("quota true", "[tenants.t]\nmax_waiting_bytes = true\n", "tenants.t.max_waiting_bytes"),
    ("no table", "keys = 1\n", "keys: must be a table"),
    ("certificates", 'service_certificates = "service"\n', "service_certificates"),
]


@pytest.mark.parametrize(("text", "said"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_what_is_wrong_is_told_by_line_or_field(text: str, said: str) -> None:
    with pytest.raises(KeysError, match=said.replace("(", r"\(")) as error:
        parse(text)
    assert "penstock.a.b" not in str(error.value)


def test_channels_are_those_of_both_key_and_tenant() -> None:
    keys = parse(
        '[tenants.t]\nchannels = ["a", "b"]\n'
        f'[keys.narrow]\nrole = "client"\ntenant = "t"\nchannels = ["b", "c"]\n{HASH}'
        f'[keys.wide]\nrole = "client"\ntenant = "t"\n{HASH}'
        f'[keys.free]\nrole = "client"\n{HASH}'
    )
    allowed = {name: keys.channels_of(key) for name, key in keys.keys.items()}
    assert allowed == {"narrow": frozenset("b"), "wide": frozenset("ab"), "free": None}


names = st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True)


@given(
    names,
    st.sampled_from(list(Role)),
    names,
    st.none() | st.frozensets(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20), max_size=3),
    st.integers(0, 4_000_000_000),
)
def test_a_key_that_was_put_in_is_read_back_and_can_be_revoked(
    name: str, role: Role, tenant: str, channels: frozenset[str] | None, expires_s: int
) -> None:
    text = f"# mine\n[tenants.x]\n\n[keys.before]\nrole = 'service'  # [keys.{name}]\n{HASH}"
    key = ApiKey(name, role, tenant, channels, expires_s * 1_000_000_000, sha256=digest(new_key(name)))
    if name == "before":
        return
    changed = with_key(text, key)
    assert changed.startswith(text)
    assert parse(changed).keys[name] == key
    with pytest.raises(KeysError, match="already"):
        with_key(changed, key)
    revoked = with_revoked(changed, name)
    found = parse(revoked).keys
    assert found[name].revoked
    assert not found["before"].revoked
    assert with_revoked(revoked, name) == revoked
    assert tomllib.loads(revoked)["tenants"] == {"x": {}}


@pytest.mark.parametrize("text", [f'keys.a = {{role = "client", {HASH.strip()}}}\n'])
def test_a_table_of_another_form_is_left_to_its_owner(text: str) -> None:
    with pytest.raises(KeysError, match="by hand"):
        with_revoked(text, "a")


def test_revoked_false_becomes_true() -> None:
    assert parse(with_revoked(f'[keys.a]\nrole = "client"\nrevoked = false\n{HASH}', "a")).keys["a"].revoked


def test_the_command_shows_a_key_once_and_keeps_its_hash(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    made = penstock("keys", "create", "ci", "--file", str(file), "--tenant", "acme", "--channel", "batch")
    assert made.returncode == 0, made.stderr
    key = made.stdout.strip()
    assert key not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    assert parse(file.read_text()).keys["ci"].sha256 == digest(key)
    assert penstock("keys", "revoke", "ci", "--file", str(file)).returncode == 0
    listed = penstock("keys", "list", "--file", str(file)).stdout
    assert listed.splitlines()[1].split() == ["ci", "client", "acme", "batch", "-", "revoked"]
    again = penstock("keys", "create", "ci", "--file", str(file))
    assert (again.returncode, "already" in again.stderr) == (2, True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_changed_file_is_still_read_by_whom_it_was(tmp_path: Path) -> None:
    """A service that could not read the file any more would go on with a key that is revoked."""
    file = tmp_path / "keys.toml"
    assert penstock("keys", "create", "ci", "--file", str(file)).returncode == 0
    os.chown(file, 10001, 10002)
    file.chmod(0o640)
    assert penstock("keys", "revoke", "ci", "--file", str(file)).returncode == 0
    found = file.stat()
    assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (10001, 10002, 0o640)
    assert [path.name for path in tmp_path.iterdir()] == ["keys.toml"]


def test_a_change_keeps_the_one_that_it_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys.toml"
    api_keys.create("old", file)
    alone: list[bool] = []
    lock, add = fcntl.flock, with_key

    def wait_for_a_revocation(handle: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        api_keys.revoke("old", file)
        lock(handle, how)

    def look_for_others(text: str, key: ApiKey) -> str:
        directory = os.open(tmp_path, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            lock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(directory)
        alone.append(True)
        return add(text, key)

    monkeypatch.setattr(fcntl, "flock", wait_for_a_revocation)
    monkeypatch.setattr(api_keys, "with_key", look_for_others)
    api_keys.create("new", file)
    assert alone
    keys = parse(file.read_text()).keys
    assert (keys["old"].revoked, keys["new"].revoked) == (True, False)
    assert [path.name for path in tmp_path.iterdir()] == ["keys.toml"]


class Ring:
    """A keyring over a file, with a clock that is set and a count of errors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now_ns = 1
        self.errors = 0
        self.key = new_key("a")
        self.write(self.table())
        self.ring = Keyring(path, lambda: self.now_ns, self._count)

    def _count(self) -> None:
        self.errors += 1

    def table(self, fields: str = "") -> str:
        return f'[keys.a]\nrole = "client"\n{fields}\nsha256 = "{digest(self.key).hex()}"\n'

    def write(self, text: str) -> None:
        fresh = self.path.with_suffix(".new")
        fresh.write_text(text)
        fresh.replace(self.path)

    def refused(self, authorization: str) -> Reason:
        with pytest.raises(NotAllowedError) as error:
            self.ring.authenticate(authorization)
        assert self.key.rpartition(".")[2] not in str(error.value)
        return error.value.reason


@pytest.fixture
def ring(tmp_path: Path) -> Ring:
    return Ring(tmp_path / "keys.toml")


def test_only_the_whole_key_is_good(ring: Ring) -> None:
    assert ring.ring.authenticate(f"Bearer {ring.key}").key_id == "a"
    assert ring.ring.authenticate(f"bearer  {ring.key} ").key_id == "a"
    changes: list[tuple[str, Reason]] = [
        ("", Reason.MISSING),
        ("Bearer", Reason.MISSING),
        ("Bearer ", Reason.MISSING),
        (f"Basic {ring.key}", Reason.MISSING),
        (ring.key, Reason.MISSING),
        (f"Bearer {ring.key}x", Reason.UNKNOWN),
        (f"Bearer {ring.key[:-1]}", Reason.UNKNOWN),
        (f"Bearer {ring.key.replace('.a.', '.b.')}", Reason.UNKNOWN),
        (f"Bearer {digest(ring.key).hex()}", Reason.UNKNOWN),
        ("Bearer penstock.a.", Reason.UNKNOWN),
        ("Bearer \udcff", Reason.UNKNOWN),
    ]
    assert [(text, ring.refused(text)) for text, _ in changes] == changes


async def test_a_key_ends_with_its_time_and_with_its_revocation(ring: Ring) -> None:
    ring.write(ring.table("expires = 1970-01-01T00:00:10Z"))
    assert await ring.ring.refresh()
    key = ring.ring.authenticate(f"Bearer {ring.key}")
    ring.now_ns = 10_000_000_000
    assert not ring.ring.holds(key)
    assert ring.refused(f"Bearer {ring.key}") is Reason.EXPIRED
    ring.now_ns = 1
    assert ring.ring.holds(key)
    ring.write(ring.table("revoked = true"))
    assert await ring.ring.refresh()
    assert not ring.ring.holds(key)
    assert ring.refused(f"Bearer {ring.key}") is Reason.REVOKED


async def test_a_key_of_another_tenant_role_or_secret_is_another_one(ring: Ring) -> None:
    key = ring.ring.authenticate(f"Bearer {ring.key}")
    good = ring.table()
    for table in (ring.table('tenant = "t"'), good.replace("client", "operator"), good.replace("sha256", "#") + HASH):
        ring.write(table)
        assert await ring.ring.refresh()
        assert not ring.ring.holds(key), "its open calls began with rights that it has no longer"


async def test_a_key_stays_good_with_other_channels_and_until_its_present_end(ring: Ring) -> None:
    key = ring.ring.authenticate(f"Bearer {ring.key}")
    for fields in ('channels = ["batch"]', "expires = 1970-01-01T00:00:20Z", "expires = 1970-01-01T00:00:10Z"):
        ring.write(ring.table(fields))
        assert await ring.ring.refresh()
        assert ring.ring.holds(key)
    ring.now_ns = 10_000_000_000
    assert not ring.ring.holds(key)


DAMAGE: list[Callable[[Path], object]] = [
    lambda path: path.write_text("[keys."),
    lambda path: path.write_bytes(b"\xff"),
    lambda path: path.write_text("a = " + "[" * 5000),
    lambda path: path.write_text("a = " + "1" * 5000),
    lambda path: path.unlink(),
]


async def test_a_file_that_could_not_be_read_once_is_read_again(ring: Ring) -> None:
    ring.write(ring.table("revoked = true"))
    with patch.object(Path, "open", side_effect=OSError(errno.EMFILE, "Too many open files")):
        assert not await ring.ring.refresh()
    assert await ring.ring.refresh()
    assert ring.refused(f"Bearer {ring.key}") is Reason.REVOKED


async def test_what_was_refused_is_not_parsed_again_until_it_is_another_file(ring: Ring) -> None:
    with patch.object(keyring, "parse", side_effect=parse) as parsed:
        for number, damaged in enumerate(("[keys.", "[tenants."), 1):
            ring.write(damaged)
            for _ in range(3):
                assert not await ring.ring.refresh()
            assert parsed.call_count == number
    ring.write(ring.table("revoked = true"))
    assert await ring.ring.refresh()


async def test_the_loop_goes_on_while_a_file_is_parsed(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    parsing, loop_ran = threading.Event(), threading.Event()

    def parse_slowly(text: str) -> Keys:
        parsing.set()
        assert loop_ran.wait(60), "nothing else is done meanwhile"
        return parse(text)

    monkeypatch.setattr(keyring, "parse", parse_slowly)
    guard = Guard(ring.ring)
    changed = asyncio.Event()
    guard.on_change = changed.set
    ring.write(ring.table("revoked = true"))
    watching = asyncio.create_task(guard.watch())
    while not (parsing.is_set() or watching.done()):
        await asyncio.sleep(0)
    assert ring.ring.authenticate(f"Bearer {ring.key}").key_id == "a", "until it is parsed what was good is in force"
    loop_ran.set()
    await asyncio.wait({watching, news := asyncio.create_task(changed.wait())}, return_when=asyncio.FIRST_COMPLETED)
    watching.cancel()
    assert news.done()
    assert ring.refused(f"Bearer {ring.key}") is Reason.REVOKED


@pytest.mark.parametrize("damage", DAMAGE)
async def test_a_damaged_file_is_counted_once_and_changes_nothing(ring: Ring, damage: Callable[[Path], object]) -> None:
    damage(ring.path)
    for _ in range(3):
        assert not await ring.ring.refresh()
    assert ring.errors == 1
    assert ring.ring.authenticate(f"Bearer {ring.key}").key_id == "a"
    ring.write(ring.table("revoked = true"))
    assert await ring.ring.refresh()
    assert ring.errors == 1
    assert ring.refused(f"Bearer {ring.key}") is Reason.REVOKED


@pytest.mark.parametrize("damage", DAMAGE)
async def test_metrics_say_that_a_file_is_refused_until_one_is_taken(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    path, registry = tmp_path / "keys.toml", CollectorRegistry()
    path.write_text(GOOD)
    ring = keyring_of(QueueSettings(PENSTOCK_KEYS=path), SystemClock(), AuthMetrics("queue", registry))
    assert ring is not None
    refused = [registry.get_sample_value("penstock_queue_keys_refused")]
    changes: list[Callable[[Path], object]] = [damage, lambda _: None, lambda path: path.write_text(GOOD)]
    for change in changes:
        change(path)
        await ring.refresh()
        refused.append(registry.get_sample_value("penstock_queue_keys_refused"))
    assert refused == [0, 1, 1, 0]
