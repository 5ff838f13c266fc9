"""Settings of the worker. What is not named here is an engine argument, under the engine's own name for it."""

from __future__ import annotations

import json
import re
import socket
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, Self

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from penstock.address import DEFAULT_QUEUE_ADDRESS, DEFAULT_SCHEDULER_ADDRESS
from penstock.exits import EX_CONFIG
from penstock.server_flags import wrong_here
from services.config import GrpcSettings, ListenAddress, PeerAddress, Seconds
from services.config_flags import flags_of_variables
from services.config_reading import load_recorded, told
from services.config_source import Record

PROGRAM = "penstock worker"

NO_TOOL_PARSERS = "the simulated engine has no tool parsers"
"""What is wrong with naming one."""

ENGINE_STALL_S = 300.0
"""What an engine does within one step takes up to a minute: the compilation of a helper at the first request that needs
it, half of that; the prefill of a chunk, or the load of an adapter, some seconds. Five times as much is for a processor
that other work has most of. An engine that is given up wrongly costs each of its runs an attempt, and the fleet the
time of its start; one that is given up late, these minutes for those who wait for it."""

SHORT_OPTIONS = {
    "O": "optimization-level",
    "ac": "attention-config",
    "cc": "compilation-config",
    "dc": "diffusion-config",
    "dcp": "decode-context-parallel-size",
    "dp": "data-parallel-size",
    "dpa": "data-parallel-address",
    "dpb": "data-parallel-backend",
    "dpe": "data-parallel-external-lb",
    "dph": "data-parallel-hybrid-lb",
    "dpl": "data-parallel-size-local",
    "dpm": "data-parallel-multi-port-external-lb",
    "dpn": "data-parallel-rank",
    "dpp": "data-parallel-rpc-port",
    "dpr": "data-parallel-start-rank",
    "ep": "enable-expert-parallel",
    "n": "nnodes",
    "pcp": "prefill-context-parallel-size",
    "pp": "pipeline-parallel-size",
    "q": "quantization",
    "r": "node-rank",
    "sc": "speculative-config",
    "tp": "tensor-parallel-size",
}
"""Long names of vLLM's short options, written down because `config show` runs where there is no vLLM; the engine's
contract test compares them with vLLM's parser."""


class WorkerSettings(GrpcSettings):
    """What the worker can be told, besides the engine's own arguments."""

    model_config = SettingsConfigDict(
        **{**GrpcSettings.model_config, "env_prefix": "PENSTOCK_WORKER_", "cli_prog_name": "services.worker"}
    )

    listen: ListenAddress = Field("127.0.0.1:7430", description="HOST:PORT of the health and reflection services.")
    queue_address: PeerAddress = Field(DEFAULT_QUEUE_ADDRESS, description="HOST:PORT of the queue.")
    scheduler_address: PeerAddress = Field(DEFAULT_SCHEDULER_ADDRESS, description="HOST:PORT of the scheduler.")
    worker_id: str = Field(
        "", max_length=256, description="Name of the worker, stable over restarts; empty means HOSTNAME-PORT."
    )
    engine: Literal["vllm", "simulated"] = Field(
        "vllm", description="`simulated` invents tokens; for scale and fault tests only."
    )
    model: str = Field("", description="Name or path of the model.")
    served_model_name: list[str] = Field(
        default_factory=list,
        description="Names the model answers to, the first one being reported; empty means `model`.",
    )
    tool_call_parser: str = Field(
        "",
        description="vLLM's parser that reads function calls out of the model's output; empty refuses requests for"
        " calls. Means `--enable-auto-tool-choice` as well.",
    )
    enable_auto_tool_choice: bool = Field(
        False,
        description="Let the model choose whether to call, as `vllm serve` is told it; needs `--tool-call-parser`,"
        " which alone means the same.",
    )
    trust_request_chat_template: bool = Field(
        False,
        description="Render chats with the template they bring along, which is a program: whoever may submit can then"
        " stop the worker. Else they are refused.",
    )
    watermark_blocks: int = Field(0, ge=0, description="Usable engine blocks that are never booked.")
    tokenizer_processes: int = Field(
        1,
        ge=1,
        le=64,
        description="Processes that render and tokenize prompts, all but short ones that come alone, and look at"
        " structured outputs.",
    )
    engine_threads: int = Field(
        0, ge=0, description="OMP_NUM_THREADS of the engine; 0 leaves the environment as it is."
    )
    engine_stall_s: Seconds = Field(
        ENGINE_STALL_S,
        ge=0,
        description="Seconds without a step, though something is in the engine, after which it is taken for dead and"
        " the worker ends; 0 waits for ever. Of a time for which the worker itself was stopped, a tenth of this counts"
        " at most. A tokenizer process may take so long to load, too.",
    )

    engine_arguments: dict[str, Any] = Field(
        default_factory=dict,
        description="Arguments of the engine by name, as JSON; meant for the file's [worker.engine_arguments]."
        " Flags of the command line override them.",
    )

    @model_validator(mode="after")
    def _calls_are_read_by_a_parser(self) -> Self:
        if self.enable_auto_tool_choice and not self.tool_call_parser:
            raise ValueError("enable_auto_tool_choice: requires --tool-call-parser (worker.tool_call_parser)")
        return self

    def the_worker_id(self) -> str:
        """Return the worker's name."""
        return self.worker_id or f"{socket.gethostname()}-{self.listen.rpartition(':')[2]}"

    def names(self) -> tuple[str, ...]:
        """Return the names the model answers to, the reported one first."""
        return tuple(self.served_model_name) or (self.model or self.engine,)


class Arguments(NamedTuple):
    """The worker's settings and the engine's arguments."""

    settings: WorkerSettings
    engine_arguments: list[str]
    places: Mapping[str, str] = {}
    """By the name of each argument that is no flag of the command line: the line of the file, or the variable."""

    def with_place(self, text: str) -> str:
        """Return what the engine says of its arguments with where the first of them that `text` names was given."""
        named = re.findall(r"(?<!\S)--([\w.-]+)", text)
        return next((f"{self.places[name]}: {text}" for name in named if name in self.places), text)


def load_arguments(arguments: list[str]) -> Arguments:
    """Read command line and environment.

    Prints what is wrong and raises SystemExit(78) if a setting of the worker is
    wrong; the engine's arguments are judged by the engine.
    """
    ours, engines = split_arguments(arguments)
    settings, record = load_recorded(WorkerSettings, PROGRAM, ours)
    if strays := [*_strays(engines), *misplaced(settings, record)]:
        for line in strays:
            print(f"{PROGRAM}: {line}", file=sys.stderr)
        raise SystemExit(EX_CONFIG)
    places = _places(settings, record, engines)
    engines = [*flags_of(settings.engine_arguments), *engines]  # of two the engine takes the last
    if settings.engine == "vllm" and not settings.model:
        print(f"{PROGRAM}: --model is required: the name or path of the model to serve", file=sys.stderr)
        raise SystemExit(EX_CONFIG)
    if settings.engine == "simulated" and settings.tool_call_parser:
        print(f"{PROGRAM}: --tool-call-parser: {NO_TOOL_PARSERS}", file=sys.stderr)
        raise SystemExit(EX_CONFIG)
    return Arguments(settings, engines, places)


def misplaced(settings: WorkerSettings, record: Record) -> Iterator[str]:
    """Yield what is wrong with each engine argument that has no place there, and why."""
    for name in settings.engine_arguments:
        setting = name.replace("-", "_")
        if setting in WorkerSettings.model_fields and setting != "config":
            why = f"is a setting of the worker, not of its engine: {setting} in [worker]"
        elif not (why := wrong_here(name)):
            continue
        yield told(WorkerSettings, "engine_arguments", why, record, (name,))


def _strays(flags: list[str]) -> Iterator[str]:
    """Yield what is wrong with each flag of vLLM that has no place here."""
    for flag in flags:
        name = flag.partition("=")[0]
        if name.startswith("--") and (why := wrong_here(name)):
            yield f"{name} {why}"


def _places(settings: WorkerSettings, record: Record, flags: list[str]) -> dict[str, str]:
    """Return where each engine argument was given that no flag of the command line overrides."""
    places: dict[str, str] = {}
    given = arguments_of(flags)
    for name in settings.engine_arguments:
        dashed = name.replace("_", "-")
        if dashed not in given:
            place = told(WorkerSettings, "engine_arguments", "", record, (name,)).removesuffix(": ")
            places |= {dashed: place, f"no-{dashed}": place}
    return places


def flags_of(arguments: dict[str, Any]) -> list[str]:
    """Return engine arguments of the file as flags, in vLLM's way: true is `--name`, false `--no-name`, tables JSON."""
    flags: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            flags += [f"--{flag}", *(str(item) for item in value)]
        else:
            flags += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags


def arguments_of(flags: list[str]) -> dict[str, Any]:
    """Return flags of the engine as arguments, what `flags_of` makes of the file's turned round; values stay texts."""
    values: dict[str, list[str]] = {}
    name = ""
    for flag in flags:
        if flag.startswith("-") and not _is_number(flag):
            name, value = _option(flag)
            values[name] = [] if value is None else [value]
        elif name:
            values[name].append(flag)
    arguments: dict[str, Any] = {}
    for name, texts in values.items():
        if texts:
            arguments[name] = texts[0] if len(texts) == 1 else texts
        else:
            arguments[name.removeprefix("no-")] = not name.startswith("no-")
    return arguments


def _option(flag: str) -> tuple[str, str | None]:
    """Return the long name of an engine's flag, and the value that is said in it; None if none is."""
    name, given, value = flag.partition("=")
    said = value if given else None
    if not name.startswith("--"):
        short, dot, inside = name[1:].partition(".")
        if short in SHORT_OPTIONS:
            return SHORT_OPTIONS[short] + dot + inside, said
        if short[:1] in SHORT_OPTIONS:  # -O3, -n2
            return SHORT_OPTIONS[short[0]], flag[2:]
    return name.lstrip("-").replace("_", "-"), said


def with_flags(arguments: dict[str, Any], flags: list[str]) -> dict[str, Any]:
    """Return the engine's arguments as they are when `flags` override them."""
    given = arguments_of(flags)
    return {name: value for name, value in arguments.items() if name.replace("_", "-") not in given} | given


def split_arguments(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return the worker's own arguments and the engine's, each in order.

    A flag is the worker's if it names one of its settings; the values after a
    flag go with it. `--served-model-name a b` and `--tool_call_parser` are read as vLLM reads them.
    """
    names = {f"--{name.replace('_', '-')}" for name in WorkerSettings.model_fields} | {"--help", "-h"}
    names |= set(flags_of_variables(WorkerSettings).values())
    names |= {
        f"--no-{name.replace('_', '-')}" for name, f in WorkerSettings.model_fields.items() if f.annotation is bool
    }
    ours: list[str] = []
    engines: list[str] = []
    flag = ""
    for argument in arguments:
        if argument.startswith("-") and not _is_number(argument):
            flag = argument.partition("=")[0].replace("_", "-") if argument.startswith("--") else argument
            wanted = [flag, *argument.partition("=")[2:]] if "=" in argument else [flag]
            if flag not in names:
                engines.append(argument)
            elif flag != "--served-model-name" or len(wanted) > 1:
                ours.extend(wanted)
        elif flag == "--served-model-name":
            ours.extend([flag, argument])
        else:
            (ours if flag in names else engines).append(argument)
    return ours, engines


def _is_number(argument: str) -> bool:
    try:
        float(argument)
    except ValueError:
        return False
    return True
