"""The Backup call: a backup of the store the service runs on."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import grpc

from penstock.queue.v1 import queue_pb2
from services.clock import Clock
from services.queue.committer import Committer, RefusedError
from services.queue.core.effects import QueueView
from services.queue.core.messages import InspectQueue
from services.queue.items import Lookup
from services.queue.storage.backup import NAME, Backup, BackupError, BackupExistsError, make_backup
from services.queue.storage.read_faults import code_of
from services.queue.storage.store import Store
from services.rpc.strict import BadInputError

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class BackupCall:
    """Makes backups, one at a time.

    The copy is made on the thread that commits, so no batch is being written meanwhile. Commits wait for it: for the
    flush of what is in memory, which is bounded by the write buffers, and for links.
    """

    def __init__(self, committer: Committer, clock: Clock, directory: Path) -> None:
        """Write backups of the committer's store to `directory`."""
        self._committer = committer
        self._clock = clock
        self._directory = directory
        self._busy = False

    async def make(self, request: queue_pb2.BackupRequest, context: Context) -> queue_pb2.BackupResponse:
        """Return the backup once it is on disk. Raises BadInputError for what cannot be its name."""
        if request.name and not NAME.fullmatch(request.name):
            raise BadInputError(
                f"name: {request.name!r} must be letters, digits, dots, dashes and underscores, at most 100"
            )
        if self._busy:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another backup is being made")
        self._busy = True
        try:
            backup, view = await self._copy(request.name)
        except BackupExistsError as error:
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, str(error))
        except BackupError as error:
            log.error("%s", error)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except RefusedError as error:
            await context.abort(code_of(error), str(error))
        finally:
            self._busy = False
        return queue_pb2.BackupResponse(
            path=str(backup.path.absolute()),
            store_id=backup.store_id,
            made_unix_ns=backup.made_ns,
            waiting=sum(line.ready for line in view.lines),
            leased=sum(line.leased for line in view.lines),
            dead=view.dead,
            results=view.results,
        )

    async def _copy(self, name: str) -> tuple[Backup, QueueView]:
        made: list[tuple[Backup, QueueView] | BackupError] = []

        def copy(store: Store) -> None:
            try:
                backup = make_backup(store, self._directory, name, self._clock.now_ns())
                # Now, and not with the answer: what came before this call in its batch is stepped before that.
                made.append((backup, self._committer.machine.overview()))
            except BackupError as error:
                made.append(error)

        def item(ticket: int) -> Lookup:
            def read(store: Store) -> InspectQueue:
                copy(store)
                return InspectQueue(ticket)

            return Lookup(ticket, read)

        await self._committer.ask(item)
        (result,) = made
        if isinstance(result, BackupError):
            raise result
        return result
