"""`penstock submit | get | watch | cancel | dead`: single requests and dead letters."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import asdict
from datetime import UTC, datetime
from enum import Enum
from functools import partial
from typing import Annotated, Any

import typer

from penstock.address import DEFAULT_QUEUE_ADDRESS, DEFAULT_SCHEDULER_ADDRESS
from penstock.cli.app import App
from penstock.cli.calls import QUICK_RETRY_S, QueueOption, SchedulerOption, call
from penstock.cli.errors import CommandError, one_line
from penstock.cli.vain import UNDRAIN, Look, telling
from penstock.client import Client
from penstock.exits import EX_INCOMPLETE, EX_USAGE
from penstock.fields import RequestFields
from penstock.fleet import all_drained
from penstock.limits import MAX_CURSOR
from penstock.results import Progress, RequestState, Result, TokenDelta
from penstock.telling import tell

dead = App(help="Requests whose attempts are used up.", no_args_is_help=True)

LEAST_DEADLINE_S = 0.001
"""A deadline has to be after now; less than this has passed before the queue reads it."""

Ids = Annotated[list[str], typer.Argument(help="Request ids.", metavar="ID...")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")]


def submit(
    prompt: Annotated[str, typer.Argument(help="Text to continue, or with --chat the user's message.")],
    chat: Annotated[bool, typer.Option("--chat", help="Send the text as a chat message.")] = False,
    system: Annotated[str, typer.Option(help="With --chat: a system message before it.")] = "",
    token_ids: Annotated[bool, typer.Option("--token-ids", help="The text is token ids, separated by commas.")] = False,
    model: Annotated[str, typer.Option(help="Model asked for; empty takes any.")] = "",
    channel: Annotated[str, typer.Option(help="Channel to wait in; empty takes the queue's default.")] = "",
    priority: Annotated[int, typer.Option(help="Lower leaves first within the channel.")] = 0,
    deadline_s: Annotated[
        float | None, typer.Option(min=LEAST_DEADLINE_S, help="Seconds after which no answer is wanted.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens; without it, up to the window.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Probability mass to sample from.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of this request's random numbers.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the output; may be repeated.")] = None,
    n: Annotated[int | None, typer.Option("-n", min=1, help="Number of completions.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end token.")] = False,
    key: Annotated[str, typer.Option(help="Idempotency key: a second submit with it is the same request.")] = "",
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the result and print its text.")] = False,
    stream: Annotated[bool, typer.Option("--stream", help="Print the text while it is generated.")] = False,
    as_json: AsJson = False,
    queue: QueueOption = DEFAULT_QUEUE_ADDRESS,
    scheduler: SchedulerOption = DEFAULT_SCHEDULER_ADDRESS,
) -> None:
    """Submit one request and print its id, or with --wait or --stream its text."""
    if stream and n is not None and n > 1:
        raise CommandError("--stream shows one completion; for -n above 1 use --wait", EX_USAGE)
    if stream and as_json:
        raise CommandError("--stream prints the text as it comes; for JSON use --wait", EX_USAGE)
    if system and not chat:
        raise CommandError("--system: is for --chat; a text alone has no messages", EX_USAGE)
    if token_ids and chat:
        raise CommandError("--token-ids: a chat message is text", EX_USAGE)
    given: dict[str, Any] = {
        "model": model,
        "channel": channel,
        "priority": priority,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
        "stop": stop or None,
        "n": n,
        "ignore_eos": ignore_eos or None,
        "idempotency_key": key or None,
        "deadline_s": deadline_s,
    }
    if chat:
        opening = [{"role": "system", "content": system}] if system else []
        given["messages"] = [*opening, {"role": "user", "content": prompt}]
    else:
        given["prompt"] = _ids(prompt) if token_ids else prompt
    fields = RequestFields(**{k: v for k, v in given.items() if v is not None})  # type: ignore[typeddict-item]
    call(_submit(queue, scheduler, fields, wait, stream, as_json))


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise CommandError("--token-ids: not a list of numbers separated by commas", EX_USAGE) from None


async def _submit(queue: str, scheduler: str, fields: RequestFields, wait: bool, stream: bool, as_json: bool) -> None:
    async with Client(queue, retry_for_s=QUICK_RETRY_S) as client:
        request_id = await client.submit(**fields)
    if not (wait or stream):
        _print_json({"request_id": request_id}) if as_json else print(request_id)
        return

    async def waits(client: Client) -> bool:
        return (await client.get(request_id)).state is RequestState.READY

    model = fields.get("model", "")
    try:
        # With the patience of a client: the queue has the request, and comes back.
        async with Client(queue) as client, telling(queue, scheduler, partial(_why, model), waits, _say):
            if stream:
                await _follow(client, request_id)
                return
            result = await client.result(request_id)
    except CommandError:
        raise  # the answer, though not a good one
    except BaseException:
        tell(f"{request_id} has no answer yet; `penstock get` and `penstock cancel` take this id", sys.stderr)
        raise
    _show_result(result, as_json)


def _why(model: str, told: Look) -> Iterator[str]:
    """Yield why no connected worker takes a request for `model`; empty is any."""
    if not told.names:
        yield "no worker is connected"
    elif model and model not in told.names:
        yield f"no connected worker serves the model {model!r} (served: {', '.join(sorted(told.names))})"
    elif model in told.drained or told.all_drained:
        yield f"{all_drained(model)}: {UNDRAIN}"


def _say(text: str) -> None:
    tell(text, sys.stderr)


async def _follow(client: Client, request_id: str) -> None:
    """Print the text of the first completion as it comes; a lost attempt starts a new line."""
    attempt, printed = 0, ""
    async with aclosing(client.events(request_ids=[request_id], tokens=True)) as events:
        async for event in events:
            if isinstance(event, TokenDelta) and event.index == 0:
                if attempt and event.attempt != attempt:
                    print(_begins_again(event.attempt), end="")
                    printed = ""
                attempt = event.attempt
                printed += event.text
                print(event.text, end="", flush=True)
            elif isinstance(event, Result):
                print(_rest(event, printed))
                _check(event)


def _rest(result: Result, printed: str) -> str:
    """Return what is to follow `printed`, so that the whole text stands there.

    Tokens that were generated while queue or worker did not reach each other come with the result alone.
    """
    if result.text.startswith(printed):
        return result.text[len(printed) :]
    if not result.choices:
        return ""
    return _begins_again(result.attempts) + result.text


def _begins_again(attempt: int) -> str:
    return f"\n[attempt {attempt} begins again]\n"


def get(
    request_id: Annotated[str, typer.Argument(help="Request id.", metavar="ID")] = "",
    key: Annotated[str, typer.Option(help="Idempotency key, instead of an id.")] = "",
    as_json: AsJson = False,
    queue: QueueOption = DEFAULT_QUEUE_ADDRESS,
) -> None:
    """Print where a request is, and its text once it has ended."""
    if bool(request_id) == bool(key):
        raise CommandError("give either a request id or --key", EX_USAGE)

    async def work() -> None:
        async with Client(queue, retry_for_s=QUICK_RETRY_S) as client:
            info = await client.get(request_id or None, idempotency_key=key)
            if as_json:
                _print_json(asdict(info))
                if info.result is not None:
                    _check(info.result)
                return
            where = f" on {info.worker_id}" if info.worker_id else ""
            error = f"; last error: {one_line(info.last_error)}" if info.last_error else ""
            print(f"{info.request_id}  {info.state.name.lower()}{where}  attempts {info.attempts}{error}")
            if info.result is not None:
                _show_result(info.result, False)

    call(work())


def watch(
    ids: Annotated[list[str] | None, typer.Argument(help="Request ids.", metavar="[ID]...")] = None,
    batch: Annotated[str | None, typer.Option(help="Watch this batch instead.")] = None,
    cursor: Annotated[int, typer.Option(min=0, max=MAX_CURSOR, help="With --batch: go on after this cursor.")] = 0,
    follow: Annotated[bool, typer.Option("--follow", help="With --batch: wait for requests to come.")] = False,
    tokens: Annotated[bool, typer.Option("--tokens", help="Print tokens while they are generated.")] = False,
    as_json: AsJson = False,
    queue: QueueOption = DEFAULT_QUEUE_ADDRESS,
) -> None:
    """Print results as requests end, in completion order."""
    _check_subject(ids, batch)
    if ids and (cursor or follow):
        raise CommandError(f"{'--cursor' if cursor else '--follow'}: is for --batch; ids are watched whole", EX_USAGE)

    async def work() -> None:
        async with Client(queue) as client:
            stream = client.events(batch, request_ids=ids or (), cursor=cursor, follow=follow, tokens=tokens)
            failed = []
            async with aclosing(stream) as events:
                async for event in events:
                    _show_event(event, as_json)
                    if isinstance(event, Result) and ids and not event.completed:
                        failed.append(event.request_id)
        if failed:
            raise CommandError(f"without a good answer: {', '.join(failed)}", EX_INCOMPLETE)

    call(work())


def _check_subject(ids: list[str] | None, batch: str | None) -> None:
    """Raise CommandError unless either requests or a batch are named.

    An empty name is none: it would stand for every request that has no batch, where a script meant a variable.
    """
    if batch == "":
        raise CommandError("--batch: is empty", EX_USAGE)
    if bool(ids) == (batch is not None):
        raise CommandError("give request ids or --batch", EX_USAGE)


def _show_event(event: Result | TokenDelta | Progress, as_json: bool) -> None:
    if as_json:
        _print_json({"event": type(event).__name__, **asdict(event)})
    elif isinstance(event, Result):
        print(
            f"{event.request_id}  {event.outcome.name.lower()}  cursor {event.cursor}  {_one_line(event)}", flush=True
        )
    elif isinstance(event, TokenDelta):
        print(f"{event.request_id}  {event.index}:{event.offset}  {event.text!r}", flush=True)


def _one_line(result: Result) -> str:
    return repr(result.text) if result.error is None else one_line(result.error.message)


def cancel(
    ids: Annotated[list[str] | None, typer.Argument(help="Request ids.", metavar="[ID]...")] = None,
    batch: Annotated[str | None, typer.Option(help="Cancel everything of this batch instead.")] = None,
    queue: QueueOption = DEFAULT_QUEUE_ADDRESS,
) -> None:
    """Cancel requests: waiting ones end at once, running ones are aborted in the engine."""
    _check_subject(ids, batch)

    async def work() -> None:
        async with Client(queue, retry_for_s=QUICK_RETRY_S) as client:
            done = await client.cancel(*(ids or ()), batch=batch)
            print(f"{done.cancelled} cancelled, {done.aborting} being aborted")
            # None is left where the answer to a cancel was lost and it was said again: only a wrong name is an error.
            if batch is not None and not done.cancelled + done.aborting and not await _is_known(client, batch):
                raise CommandError(f"nothing is known of the batch {batch!r}", EX_INCOMPLETE)
        if done.not_cancelled:
            raise CommandError(f"unknown or ended already: {', '.join(done.not_cancelled)}", EX_INCOMPLETE)

    call(work())


async def _is_known(client: Client, batch: str) -> bool:
    """Return whether there is a request or a result of the batch."""
    async with aclosing(client.wire_ended(batch)) as events:
        async for event in events:
            if event.HasField("result") or event.progress.waiting + event.progress.running:
                return True
    return False


@dead.command("list")
def dead_list(as_json: AsJson = False, queue: QueueOption = DEFAULT_QUEUE_ADDRESS) -> None:
    """Print the dead letters, oldest first."""

    async def work() -> None:
        async with Client(queue, retry_for_s=QUICK_RETRY_S) as client:
            async for letter in client.dead_letters():
                if as_json:
                    _print_json(asdict(letter))
                    continue
                died = datetime.fromtimestamp(letter.died_unix_ns / 1e9, UTC).isoformat(timespec="seconds")
                error = one_line(letter.last_error)
                print(f"{letter.request_id}  {died}  {letter.channel}  attempts {letter.attempts}  {error}")

    call(work())


@dead.command("requeue")
def dead_requeue(
    ids: Annotated[list[str] | None, typer.Argument(help="Request ids.", metavar="[ID]...")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Requeue every dead letter.")] = False,
    queue: QueueOption = DEFAULT_QUEUE_ADDRESS,
) -> None:
    """Put dead letters back to the front of their lines, with fresh attempts."""
    if bool(ids) == everything:
        raise CommandError("give request ids or --all", EX_USAGE)

    async def work() -> None:
        async with Client(queue, retry_for_s=QUICK_RETRY_S) as client:
            done = await client.requeue(*(ids or ()), all_dead=everything)
        print(f"{done.requeued} requeued")
        if done.not_dead:
            raise CommandError(f"not dead letters: {', '.join(done.not_dead)}", EX_INCOMPLETE)

    call(work())


def _show_result(result: Result, as_json: bool) -> None:
    if as_json:
        _print_json(asdict(result))
    else:
        for choice in result.choices:
            print(choice.text)
    _check(result)


def _check(result: Result) -> None:
    """Raise CommandError if the request did not complete."""
    if not result.completed:
        why = f": {one_line(result.error.message)}" if result.error else ""
        raise CommandError(f"{result.request_id} {result.outcome.name.lower()}{why}", EX_INCOMPLETE)


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(_plain(value), ensure_ascii=False), flush=True)


def _plain(value: Any) -> Any:
    """Return `value` with enums as their names."""
    if isinstance(value, Enum):
        return value.name.lower()
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
