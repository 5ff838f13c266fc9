"""Looks at the configuration of all services: `python -m services.config_check check FILE`, `… show SERVICE [flags]`.

The `penstock config` command starts it. It reads what a service started here would read, environment included. Exit
status: 0 if all is well, 2 for wrong arguments, 78 if a setting is wrong.
"""

from __future__ import annotations

import ipaddress
import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import combinations
from typing import Any, NamedTuple

from pydantic import BaseModel, SecretStr

from penstock.config_file import CALLERS, CONFIG_VARIABLE, ConfigFile, ConfigFileError, client_faults
from penstock.credentials import refused_ones
from penstock.exits import EX_CONFIG, EX_USAGE
from penstock.keys import KeysError
from penstock.tls import TlsError, TlsIdentity, plain_ones
from services.auth.keyring import Keyring
from services.config import ServiceSettings, is_loopback
from services.config_reading import Loaded, SettingsRefusedError, read_settings, told
from services.config_source import DEFAULT, FLAG, key_of
from services.gateway.settings import GatewaySettings
from services.queue.settings import QueueSettings
from services.scheduler.settings import SchedulerSettings
from services.worker.settings import NO_TOOL_PARSERS, WorkerSettings, flags_of, misplaced, split_arguments, with_flags
from services.worker.simulated.settings import WrongArgumentsError, read_arguments

KINDS: dict[str, type[ServiceSettings]] = {
    "queue": QueueSettings,
    "scheduler": SchedulerSettings,
    "worker": WorkerSettings,
    "gateway": GatewaySettings,
}

PEERS = {"queue_address": "queue", "scheduler_address": "scheduler"}
"""Settings that say where another service is."""

MASK = "********"

WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
"""A word of a name, however it is written: `hf-token`, `api_key`, `accessToken`, `APIKey`."""

SECRET = re.compile(r"(token|key|password|passwd|passphrase|secret|credential)s?$")
"""Last words of names of arguments of vLLM whose values are not shown; `apikey` is written as one."""

OF_TEXT = frozenset(
    ("bos", "eos", "pad", "unk", "sep", "cls", "mask", "special", "stop", "image", "audio", "video", "per")
)
"""Before `token` or `tokens` these say that it is of a text; `num_experts_per_token`."""

NUMBER = re.compile(r"\s*[0-9.]+[kKmMgGtT]?\s*")
"""What vLLM reads as a number: `max-num-batched-tokens = "8k"`."""


class Findings(NamedTuple):
    """What a check found: what no service would start or work with, and what is only unusual."""

    wrong: list[str]
    odd: list[str]


def check(path: str) -> int:
    """Print everything wrong with a file; return the exit status."""
    found = findings(path)
    for line in found.odd:
        print(f"note: {line}")
    for line in found.wrong:
        print(line, file=sys.stderr)
    if found.wrong:
        return EX_CONFIG
    print(f"{path}: good")
    return 0


def findings(path: str) -> Findings:
    """Read the file as each service does, and compare what they make of it."""
    wrong: list[str] = []
    odd: list[str] = []
    loaded: dict[str, Loaded[Any]] = {}
    for name, kind in KINDS.items():
        try:
            loaded[name] = read_settings(kind, ["--config", path])
        except SettingsRefusedError as error:
            # What they share is wrong for each of them.
            wrong += [line for line in error.lines if line not in wrong]
    try:
        file = ConfigFile.read(path, unknown_tables=[])  # each service has said which are unknown
    except ConfigFileError:
        return Findings(wrong, odd)  # each service has said so
    wrong += [str(error) for error in client_faults(file)]
    settings = {name: one.settings for name, one in loaded.items()}
    wrong += tls_faults(loaded)
    wrong += keys_faults(loaded)
    wrong += engine_faults(loaded)
    for text, certain in port_faults(settings):
        (wrong if certain else odd).append(f"{path}: {text}")
    wrong += [f"{path}: {text}" for text in peer_faults(settings)]
    notes = [plain_ones({name: one.tls_files for name, one in settings.items()}), without_a_key(settings)]
    odd += [f"{path}: {text}" for text in (*notes, *engine_notes(settings)) if text]
    return Findings(wrong, odd)


def engine_faults(loaded: dict[str, Loaded[Any]]) -> Iterator[str]:
    """Yield what a worker would not start with, as far as that is known without vLLM, besides wrong settings."""
    settings, record = loaded.get("worker", (None, None))
    if not isinstance(settings, WorkerSettings) or record is None:
        return
    strays = list(misplaced(settings, record))
    yield from strays
    if strays or settings.engine != "simulated":
        return
    if settings.tool_call_parser:
        yield told(WorkerSettings, "tool_call_parser", NO_TOOL_PARSERS, record)
    try:
        read_arguments(settings.engine, (), flags_of(settings.engine_arguments))
    except WrongArgumentsError as error:
        yield told(WorkerSettings, "engine_arguments", str(error), record)


def engine_notes(settings: dict[str, Any]) -> Iterator[str]:
    """Yield what is left open of a worker with a real engine."""
    worker = settings.get("worker")
    if worker is None or worker.engine != "vllm":
        return
    if not worker.model:
        yield "worker.model is not set: every worker needs --model, and `penstock up` makes a tiny one"
    if worker.engine_arguments:
        # To read them is to import vLLM, which takes many seconds and may not even be installed here.
        yield "worker.engine_arguments are not checked: vLLM judges them when a worker starts"


def tls_faults(loaded: dict[str, Loaded[Any]]) -> list[str]:
    """Return what is wrong with the TLS files that services name; what several have from one place is said once."""
    faults: dict[str, None] = {}
    for settings, record in loaded.values():
        if settings.tls_files:
            try:
                TlsIdentity(settings.tls_files)
            except TlsError as error:
                text = str(error)
                begins = {name: getattr(settings, name) for name in ("tls_cert", "tls_key", "tls_ca")}
                named = [name for name, path in begins.items() if re.match(rf"TLS files? {re.escape(path)}[:,]", text)]
                faults[told(type(settings), next(iter(named), "tls_cert"), text, record)] = None
    return list(faults)


def keys_faults(loaded: dict[str, Loaded[Any]]) -> list[str]:
    """Return what is wrong with the keys files that services name; what several have from one place is said once."""
    faults: dict[str, None] = {}
    for settings, record in loaded.values():
        if getattr(settings, "keys", None):
            try:
                Keyring(settings.keys, time.time_ns, lambda: None)
            except KeysError as error:
                faults[told(type(settings), "keys", str(error), record)] = None
    return list(faults)


def without_a_key(settings: dict[str, Any]) -> str:
    """Return what is to be said of services that have neither key nor certificate where queue or scheduler ask."""
    has_keys = any(getattr(one, "keys", None) for one in settings.values())
    callers = {name: settings[name] for name in CALLERS if name in settings}
    return refused_ones(has_keys, {n: bool(one.key.get_secret_value() or one.tls_cert) for n, one in callers.items()})


def port_faults(settings: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    """Yield each port that is asked for twice, and whether that is wrong: on machines of their own it is not."""
    ports = []
    for name, one in settings.items():
        for key in ("listen", "metrics_listen"):
            host, _, port = getattr(one, key).rpartition(":")
            if port and int(port):
                ports.append((f"{name}.{key}", name, getattr(one, key), host, port))
    for (key, owner, address, host, port), (other, rival, elsewhere, there, same) in combinations(ports, 2):
        here = is_loopback(address) and is_loopback(elsewhere)
        if port != same or (here and numeric(host) != numeric(there)):
            continue
        certain = owner == rival or here
        text = f"{key} ({address}) and {other} ({elsewhere}) are the same port"
        yield text if certain else f"{text}: they need machines of their own", certain


def peer_faults(settings: dict[str, Any]) -> Iterator[str]:
    """Yield each address of a peer on this machine at which that peer does not listen."""
    for name, one in settings.items():
        for key, peer in PEERS.items():
            address = getattr(one, key, "")
            if not address or peer not in settings or not is_loopback(address):
                continue
            listen = settings[peer].listen
            host, _, port = listen.rpartition(":")
            if int(port) and (int(port) != int(address.rpartition(":")[2]) or not reached_here(host)):
                yield f"{name}.{key} is {address}, but {peer}.listen is {listen}"


def numeric(host: str) -> str:
    """Return the address that services take a loopback host for, as gRPC resolves the name of it first."""
    return "127.0.0.1" if host == "localhost" else host.strip("[]")


def reached_here(host: str) -> bool:
    """Return whether one that listens on `host` is reached over the loopback: it is that, every address, or a name."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return True  # an empty one is every address; what a name stands for is known where the service runs
    return address.is_loopback or address.is_unspecified


def show(service: str, arguments: list[str]) -> int:
    """Print every setting of a service with its value and where it comes from; return the exit status."""
    kind = KINDS[service]
    engines: list[str] = []
    if service == "worker":
        arguments, engines = split_arguments(arguments)
    try:
        settings, record = read_settings(kind, arguments)
    except SettingsRefusedError as error:
        for line in error.lines:
            print(line, file=sys.stderr)
        return EX_CONFIG
    origins = {name: record.origin(key_of(kind, name)) for name in sorted(kind.model_fields)}
    if engines and isinstance(settings, WorkerSettings):
        settings.engine_arguments = with_flags(settings.engine_arguments, engines)
        before = origins["engine_arguments"]
        origins["engine_arguments"] = FLAG if before == DEFAULT else f"{before}, {FLAG}"
    rows = [(name, value_of(settings, name), origin) for name, origin in origins.items()]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, value, origin in rows:
        print(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {origin}")
    return 0


def value_of(settings: ServiceSettings, name: str) -> str:
    """Return a setting as text; one that holds a secret is masked."""
    value = getattr(settings, name)
    if isinstance(value, SecretStr):
        return MASK if value.get_secret_value() else ""
    if isinstance(value, dict):
        inside = (f"{key}: {_plain(key, item)}" for key, item in value.items())
        return "{" + ", ".join(inside) + "}"
    return str(value)


def _plain(name: str, value: Any) -> Any:
    """Return a channel's settings or the argument of vLLM, whatever holds a secret in it being masked."""
    if isinstance(value, BaseModel):
        return value.model_dump()
    if _is_secret(name, value):
        return MASK
    if isinstance(value, dict):
        return {key: _plain(key, item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain("", item) for item in value]
    if isinstance(value, str) and value.lstrip().startswith(("{", "[")):
        with suppress(ValueError):  # vLLM reads arguments like this one as JSON
            return json.dumps(_plain("", json.loads(value)))
    return value


def _is_secret(name: str, value: Any) -> bool:
    """Whether the argument of vLLM, or what is in it by this name, is not to be shown; `a.b` is `b` in `a`."""
    if value is None or isinstance(value, bool):
        return False
    for part in name.split("."):
        *before, last = [word.lower() for word in WORD.findall(part)] or [""]
        found = SECRET.search(last)
        # `max-num-batched-tokens` is a count, `eos_token` a piece of text.
        is_count = last == "tokens" and NUMBER.fullmatch(str(value))
        if found and not is_count and not (found[1] == "token" and OF_TEXT.intersection(before)):
            return True
    return False


def main(arguments: Sequence[str]) -> int:
    """Run the tool and return the exit status."""
    match list(arguments):
        case ["check", path]:
            return check(path)
        case ["show", service, *flags] if service in KINDS:
            return show(service, flags)
        case ["show", service, *_]:
            print(f"penstock: {service}: no such service; known: {', '.join(KINDS)}", file=sys.stderr)
            return EX_USAGE
    print(f"usage: config check FILE | config show {'|'.join(KINDS)} [flags]; {CONFIG_VARIABLE} names the file of show")
    return EX_USAGE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
