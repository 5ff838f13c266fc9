"""What a batch says of lines that are wrong or refused, and of an input that is lost."""

from __future__ import annotations

from dataclasses import replace

from penstock.batch.reader import LineError as WrongLine
from penstock.errors import NotFound
from penstock.openai.spelling import as_spelt
from penstock.request.v1 import request_pb2 as pb
from penstock.results import RequestError
from services.gateway.batch.lines import InputDamagedError, Reference
from services.gateway.core.batch import Batch, LineError, Refusal
from services.gateway.problem import NO_RETRY, Problem

MAX_MESSAGE = 500
"""Characters kept of what is wrong with a line, and of the name of the field: a hundred of each are in one record."""


class RefusedError(Exception):
    """A line or the whole input cannot be asked."""

    def __init__(self, *errors: LineError) -> None:
        """Say why."""
        super().__init__()
        self.errors = list(errors)


def lost_input(error: NotFound) -> LineError:
    """Return what a batch says of an input that is gone, or that cannot be read any more."""
    if isinstance(error, InputDamagedError):
        return LineError("file_damaged", "the input file is damaged and cannot be read", "input_file_id")
    return LineError("file_not_found", "the input file is gone", "input_file_id")


def untold(batch: Batch, error: NotFound) -> Problem:
    """Return what a client is told of an error file that has lines of the input, which cannot be read any more."""
    code = lost_input(error).code
    text = f"{batch.input_file_id}, the input of {batch.batch_id}, cannot be read any more, nor its lines here"
    return Problem(404, text, "", code, NO_RETRY)


def described(error: WrongLine) -> LineError:
    """Return what a batch says of a wrong line."""
    return LineError(error.code, str(error)[:MAX_MESSAGE], error.param[:MAX_MESSAGE] or None, error.line)


def refused(error: RequestError, request: pb.Request) -> Refusal:
    """Return what a batch says of a line that the queue refused."""
    reference = Reference.from_text(request.client_reference)
    message, param = as_spelt(error.message, error.param, reference.shape.spellings)
    return Refusal(reference.line, reference.custom_id, error.code, message[:MAX_MESSAGE], param or None)


def with_refusals(batch: Batch, refusals: list[Refusal]) -> Batch:
    """Return the batch with more lines refused; one that was submitted again after a crash counts once."""
    known = {one.line for one in batch.refusals}
    return replace(batch, refusals=[*batch.refusals, *(one for one in refusals if one.line not in known)])
