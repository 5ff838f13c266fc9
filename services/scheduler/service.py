"""The scheduler service put together: machine, runner, servicer and the queue's link, from start to SIGTERM."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc

from services.auth.setup import AuthMetrics, guard_of, keyring_of
from services.clock import SystemClock
from services.life import Loops, say_ready
from services.reload import Reloader
from services.rpc.server import Server, bind
from services.rpc.strict import add_servicer
from services.rpc.tls import security_of
from services.scheduler.core.admission.policies import POLICIES
from services.scheduler.core.admission.policy import Policy
from services.scheduler.core.admission.predictive import Predictive
from services.scheduler.core.machine import Machine
from services.scheduler.core.messages import Reconfigure
from services.scheduler.core.sharing.share import Share
from services.scheduler.links import BacklogLink
from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.rights import RIGHTS
from services.scheduler.runner import Runner
from services.scheduler.servicer import SERVICE, SchedulerServicer
from services.scheduler.settings import SchedulerSettings
from services.scheduler.tracing import CreditSpans
from services.telemetry import Telemetry


def make_policy(settings: SchedulerSettings) -> Policy:
    """Return the policy that `settings` name, with its knob where they put it."""
    if settings.policy == Predictive.name:
        return Predictive(settings.target_preemptions_per_1000)
    return POLICIES[settings.policy]


def shares_of(settings: SchedulerSettings) -> dict[str, Share]:
    """Return the share of each channel."""
    return {
        name: Share(channel.weight, channel.guaranteed_share, channel.ceiling_share, channel.tier)
        for name, channel in settings.channels.items()
    }


def make_runner(settings: SchedulerSettings, telemetry: Telemetry, metrics: SchedulerMetrics) -> Runner:
    """Build the machine that `settings` describe, and its runner."""
    clock = SystemClock()
    machine = Machine(
        make_policy(settings),
        shares_of(settings),
        int(settings.epoch_grace_s * 1e9),
        clock.now_ns(),
        settings.sequence_slack,
        int(settings.standing_grant_s * 1e9),
    )
    return Runner(machine, clock, CreditSpans(telemetry), metrics, settings.report_interval_ms * 1_000_000)


class Service:
    """One scheduler service. Make it inside the event loop that runs it."""

    def __init__(self, settings: SchedulerSettings, telemetry: Telemetry) -> None:
        """Put the parts together; nothing runs yet."""
        self._settings = settings
        auth = AuthMetrics("scheduler")
        self._guard = guard_of(keyring_of(settings, SystemClock(), auth), RIGHTS, auth)
        self._runner = make_runner(settings, telemetry, SchedulerMetrics())
        self._link = BacklogLink(settings.queue_address, "scheduler", self._runner, settings.access)
        self._reloader = Reloader(settings, "scheduler", self.reconfigure)

    def reconfigure(self, settings: SchedulerSettings) -> None:
        """Have the shares of `settings` from now on."""
        self._runner.feed([Reconfigure(shares_of(settings))])

    def bind(self) -> Server:
        """Return the bound server; raises SystemExit(69) if the port cannot be had."""
        settings, servicer = self._settings, SchedulerServicer(self._runner)

        def add(server: grpc.aio.Server) -> None:
            add_servicer(SERVICE, servicer, server, guard=self._guard)

        return bind(settings.listen, [SERVICE.full_name], add, security_of(settings), settings.reflection)

    async def run(self, stop: asyncio.Event, ready: Callable[[int], None]) -> None:
        """Serve until `stop`; call `ready` with the port once calls are answered.

        Raises SystemExit(69) if the port cannot be had, and what ended a part of the service before `stop`.
        """
        server = self.bind()
        await server.start()
        loops = Loops(
            runner=self._runner.run(),
            link=self._link.run(),
            reloader=self._reloader.run(),
            watchman=self._guard.watch(),
        )
        ready(server.port)
        try:
            await loops.until(stop)
        finally:
            self._runner.stop()
            await server.stop(self._settings.shutdown_grace_s)
            await loops.end()


async def serve(settings: SchedulerSettings, stop: asyncio.Event, telemetry: Telemetry) -> int:
    """Run the scheduler service until `stop`. Raises SystemExit(69) if the port cannot be had."""
    await Service(settings, telemetry).run(stop, lambda port: say_ready("scheduler", settings.listen, port))
    return 0
