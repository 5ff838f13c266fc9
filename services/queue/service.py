"""The queue service put together: store, machine, committer, servicer, and their lives from start to SIGTERM."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Callable
from contextlib import suppress

import grpc

from penstock.exits import EX_UNAVAILABLE
from penstock.files.v1 import files_pb2
from penstock.queue.v1 import queue_pb2
from services.auth.setup import guard_of, keyring_of
from services.clock import SystemClock
from services.descriptors import raise_file_limit
from services.life import Loops, say_ready
from services.queue.admin import Admin
from services.queue.backup_call import BackupCall
from services.queue.clockwork import PATIENCE_S, Clockwork
from services.queue.committer import Committer
from services.queue.core import records
from services.queue.core.machine import Machine
from services.queue.core.messages import Reconfigure, SetQuotas
from services.queue.core.quotas import Quota
from services.queue.core.workers import Rules
from services.queue.files.servicer import FilesServicer
from services.queue.files.shelf import Shelf, ShelfRefusedError
from services.queue.metrics import QueueMetrics
from services.queue.rights import RIGHTS
from services.queue.servicer import BOUNDS, TORN, Parts, QueueServicer
from services.queue.settings import QueueSettings
from services.queue.speaker import Greeting, Speaker
from services.queue.storage.backup import backups_of, remove_partials
from services.queue.storage.lives import Lives
from services.queue.storage.loading import Loading
from services.queue.storage.read_faults import ReadFaults
from services.queue.storage.reader import Reader
from services.queue.storage.reclaimer import Reclaimer
from services.queue.storage.recovery import Recovery, recover, store_id_of
from services.queue.storage.rocksdb_store import RocksdbStore
from services.queue.storage.store import Store, StoreError, StoreUnusableError
from services.queue.submits.intake import Intake
from services.queue.watch.following import Following
from services.queue.watch.hub import WatchHub
from services.queue.watch.watching import Watching
from services.reload import Reloader
from services.rpc.server import Server, bind
from services.rpc.strict import Doorkeeper, add_servicer
from services.rpc.tls import security_of
from services.telemetry import Telemetry

STREAM_GRACE_S = 2.0
"""Unary calls in flight at SIGTERM get this long; streams are ended at once, and their peers come back."""

SERVICE = queue_pb2.DESCRIPTOR.services_by_name["QueueService"]
FILES_SERVICE = files_pb2.DESCRIPTOR.services_by_name["FilesService"]


class Service:
    """One queue service. Make it inside the event loop that runs it."""

    def __init__(self, settings: QueueSettings, store: Store, telemetry: Telemetry, metrics: QueueMetrics) -> None:
        """Take over `store`; raises StoreError or StoreUnusableError if it cannot be read or written."""
        self._settings = settings
        self._store = store
        self._metrics = metrics
        self._clock = SystemClock()
        self._keyring = keyring_of(settings, self._clock, metrics.auth)
        self._guard = guard_of(self._keyring, RIGHTS, metrics.auth)
        self._guard.on_change = lambda: self.committer.post(SetQuotas(self._quotas()))
        recovery = Recovery(store)
        recovery.pass_numbers_over()
        store_id = store_id_of(store, lambda: secrets.token_hex(4))
        self._lives = Lives(store, self._clock.now_ns())
        channels = tuple(settings.channels)
        lease_ns = int(settings.lease_s * 1e9)
        self._rules = rules = Rules(
            channels,
            settings.max_attempts,
            lease_ns,
            int(settings.worker_grace_s * 1e9),
            settings.max_inflight,
            int(PATIENCE_S * 1e9),
        )
        greeting = Greeting(store_id, lease_ns, settings.max_inflight)
        self._hub = WatchHub()
        self._speaker = Speaker(
            self._hub,
            metrics,
            telemetry,
            self._clock,
            greeting,
            lambda seq: store.get(records.PAYLOADS, records.seq_key(seq)),
        )
        faults = ReadFaults(metrics.store_failures.inc)
        loading = Loading(recovery)
        machine = Machine(store_id, rules, loading.first, self._clock.now_ns(), self._quotas())
        self.committer = Committer(
            store,
            lambda: Machine(store_id, self._rules, recover(store), self._clock.now_ns(), self._quotas()),
            self._clock,
            self._speaker,
            settings.disk_free_min_bytes,
            loading,
            machine,
            faults,
        )
        self._hub.reset(machine.seal().progress)
        self._reader = Reader(store, store_id, faults)
        self._watching = Watching(self.committer, self._reader, self._hub, store_id)
        self._following = Following(self.committer, self._reader, self._hub, store_id)
        self._speaker.on_reset = self._renew_interests
        self.committer.health.check_disk()
        metrics.disk_free.set(self.committer.health.free_bytes_if_known)
        metrics.disk_free_min.set(settings.disk_free_min_bytes)
        self._intake = intake = Intake(
            self.committer, channels, settings.default_channel, self._clock, telemetry, metrics
        )
        self._admin = Admin(
            self.committer,
            self._reader,
            self._speaker,
            metrics,
            self._clock,
            store_id,
            intake.batch_channel,
            self._lives.ages,
        )
        backups = settings.backup_dir or backups_of(settings.data_dir)
        remove_partials(backups, store_id)  # of its last life
        backup = BackupCall(self.committer, self._clock, backups)
        parts = Parts(
            self.committer,
            self._speaker,
            self._hub,
            intake,
            self._admin,
            self._watching,
            self._following,
            metrics,
            greeting,
            backup,
        )
        self.servicer = QueueServicer(parts)
        self._reloader = Reloader(settings, "queue", self.reconfigure, registry=metrics.registry)
        self._shelf = Shelf(store, self._clock, self._shelf_refusal, faults, self._lives.ages)
        self._reclaimer = Reclaimer(store, self.committer.health, settings.disk_free_min_bytes, metrics.reclaimed.inc)
        self.letters = self._speaker.letters
        self.clockwork = Clockwork(
            settings, self._clock, self.committer, self._hub, self._admin, self._shelf, metrics, self._lives,
            self.letters,
        )  # fmt: skip
        metrics.commit_age.set_function(self.clockwork.commit_age_s)

    def _renew_interests(self) -> None:
        """Tell a rebuilt machine whose tokens are wanted."""
        self._watching.renew_interests()
        self._following.renew_interests()

    def _quotas(self) -> dict[str, Quota]:
        """Return what may wait of each tenant that the keys file limits."""
        tenants = {} if self._keyring is None else self._keyring.keys.tenants
        limits = {
            name: Quota(tenant.max_waiting_requests, tenant.max_waiting_bytes) for name, tenant in tenants.items()
        }
        return {name: quota for name, quota in limits.items() if quota != Quota()}

    def _shelf_refusal(self, has_content: bool) -> ShelfRefusedError | None:
        """Say why the store takes nothing that needs room now. Content it takes when it takes submits."""
        health = self.committer.health
        health.check_disk()
        text = health.refusal() if has_content or health.is_tight else ""
        return ShelfRefusedError(text, full=health.is_disk_full) if text else None

    def reconfigure(self, settings: QueueSettings) -> None:
        """Have the channels of `settings` from now on."""
        channels = tuple(settings.channels)
        self._rules = self._rules._replace(channels=channels)
        self.committer.post(Reconfigure(channels))
        self._intake.reconfigure(channels, settings.default_channel)

    def bind(self) -> Server:
        """Return the bound server; raises SystemExit(69) if the port cannot be had."""
        doorkeeper = Doorkeeper()

        def add(server: grpc.aio.Server) -> None:
            add_servicer(SERVICE, self.servicer, server, doorkeeper, self._guard, BOUNDS, TORN)
            add_servicer(FILES_SERVICE, FilesServicer(self._shelf), server, doorkeeper, self._guard)

        names = [SERVICE.full_name, FILES_SERVICE.full_name]
        settings = self._settings
        return bind(settings.listen, names, add, security_of(settings), settings.reflection)

    async def run(self, stop: asyncio.Event, ready: Callable[[int], None]) -> None:
        """Serve until `stop`; call `ready` with the port once requests are answered.

        Raises SystemExit(69) if the port cannot be had, and what ended a part of the service before `stop`.
        """

        server = self.bind()
        loops = Loops(
            committer=self.committer.run(),
            shelf=self._shelf.run(),
            ticks=self.clockwork.ticks(),
            sweeps=self.clockwork.sweeps(),
            reports=self.clockwork.reports(server.report),
            reclaimer=self._reclaimer.run(self.committer.loaded),
            reloader=self._reloader.run(),
            watchman=self._guard.watch(),
        )
        await server.start()
        ready(server.port)
        try:
            await loops.until(stop)
        finally:
            self._speaker.end_all("the queue service is stopping")
            self._watching.end_all("the queue service is stopping")
            self._following.end_all("the queue service is stopping")
            self.servicer.end_submits("the queue service is stopping")
            await server.stop(min(self._settings.shutdown_grace_s, STREAM_GRACE_S))
            self.committer.stop()
            self._shelf.stop()
            try:
                await loops.end("committer", "shelf")
            finally:
                self._close()

    def _close(self) -> None:
        self.letters.count()
        self._reader.close()
        with suppress(StoreError):
            self._lives.note(self._clock.now_ns())
        self._store.close()


async def serve(settings: QueueSettings, stop: asyncio.Event, telemetry: Telemetry) -> int:
    """Run the queue service until `stop`. Raises SystemExit(69) if data or port cannot be had."""
    raise_file_limit()  # before the store is opened
    try:
        store = RocksdbStore(settings.data_dir, keeps_reserve=True)
        service = Service(settings, store, telemetry, QueueMetrics())
        await service.run(stop, lambda port: say_ready("queue", settings.listen, port))
    except (StoreError, StoreUnusableError) as error:  # also what is found while the store is being loaded
        print(f"penstock queue: {error}", file=sys.stderr)
        raise SystemExit(EX_UNAVAILABLE) from None
    return 0
