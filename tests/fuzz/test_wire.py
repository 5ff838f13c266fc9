"""Whatever bytes arrive on any method of queue and scheduler: a message, or a refusal that names what is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given
from hypothesis import strategies as st

from penstock.queue.v1 import queue_pb2
from penstock.request.v1 import request_pb2
from penstock.scheduler.v1 import scheduler_pb2
from services.queue import wire as queue_wire
from services.queue.admin import ids_of, subject_ids
from services.queue.submits import validate
from services.rpc.first_look import FirstLook
from services.rpc.strict import BadInputError, _checked, _decoder
from services.scheduler import wire as scheduler_wire
from services.worker import wire as worker_wire
from tests.support.arbitrary import frames, fuzzed, messages

METHODS = [
    method
    for service in (
        queue_pb2.DESCRIPTOR.services_by_name["QueueService"],
        scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"],
    )
    for method in service.methods
]
NAMES_A_FIELD = re.compile(r"^[a-z_]+[\w.\[\]]*: .")


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@fuzzed
@given(data=st.data())
def test_bytes_are_a_message_or_are_refused(method: MethodDescriptor, data: st.DataObject) -> None:
    kind = GetMessageClass(method.input_type)
    frame = data.draw(frames(kind))
    try:
        assert isinstance(_checked(_decoder(kind, FirstLook(method.input_type, {}), 0)(frame)), kind)
    except BadInputError as error:
        wrong = f"{len(frame)} bytes are not a valid {kind.DESCRIPTOR.full_name}"
        assert str(error).startswith(wrong) or NAMES_A_FIELD.match(str(error)), error
        assert len(str(error)) < 500


@fuzzed
@given(messages(request_pb2.Request))
def test_a_request_is_good_or_the_field_at_fault_is_named(request: request_pb2.Request) -> None:
    try:
        meta = queue_wire.meta_of(request, request.ByteSize())
        validate.check(request, meta, frozenset({"batch", "interactive"}))
    except validate.InvalidRequestError as error:
        assert error.failure.param
        assert error.failure.message
        return
    assert meta.channel in {"batch", "interactive"}


@fuzzed
@given(messages(queue_pb2.WorkerToQueue), messages(queue_pb2.SchedulerToQueue))
def test_messages_to_the_queue(worker: queue_pb2.WorkerToQueue, scheduler: queue_pb2.SchedulerToQueue) -> None:
    decoders: tuple[Callable[[], object], ...] = (
        lambda: queue_wire.worker_opened(1, worker.open),
        lambda: queue_wire.worker_message(1, worker),
        lambda: queue_wire.scheduler_message(1, scheduler, ("batch",)),
    )
    for decode in decoders:
        try:
            decode()
        except BadInputError as error:
            assert NAMES_A_FIELD.match(str(error)), error


@fuzzed
@given(messages(queue_pb2.CancelRequest), messages(queue_pb2.DeleteRequest), messages(queue_pb2.RequeueDeadRequest))
def test_subjects(
    cancel: queue_pb2.CancelRequest, delete: queue_pb2.DeleteRequest, requeue: queue_pb2.RequeueDeadRequest
) -> None:
    decoders: tuple[Callable[[], object], ...] = (
        lambda: subject_ids(cancel),
        lambda: subject_ids(delete),
        lambda: ids_of(requeue.request_ids),
    )
    for decode in decoders:
        try:
            decode()
        except BadInputError as error:
            assert NAMES_A_FIELD.match(str(error)), error


@fuzzed
@given(messages(scheduler_pb2.WorkerToScheduler), messages(queue_pb2.QueueToScheduler))
def test_messages_to_the_scheduler(worker: scheduler_pb2.WorkerToScheduler, queue: queue_pb2.QueueToScheduler) -> None:
    decoders: tuple[Callable[[], object], ...] = (
        lambda: scheduler_wire.worker_opened(worker, 1),
        lambda: scheduler_wire.from_worker(worker, 1),
        lambda: scheduler_wire.from_queue(queue),
    )
    for decode in decoders:
        try:
            decode()
        except scheduler_wire.InvalidFieldError as error:
            assert NAMES_A_FIELD.match(str(error)), error


@fuzzed
@given(messages(queue_pb2.QueueToWorker), messages(scheduler_pb2.Grant), messages(queue_pb2.Deliver))
def test_messages_to_the_worker(
    message: queue_pb2.QueueToWorker, grant: scheduler_pb2.Grant, deliver: queue_pb2.Deliver
) -> None:
    worker_wire.queue_message(message)
    worker_wire.granted(grant)
    worker_wire.delivered(deliver)
    worker_wire.prompt_spec(deliver.request)
