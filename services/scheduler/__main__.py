"""Starts the credit scheduler: `python -m services.scheduler`."""

from __future__ import annotations

import asyncio
import logging
import sys

from penstock.exits import EX_SOFTWARE
from penstock.keys import Role
from penstock.telling import tell
from services.auth.guard import EVERYONE, Right
from services.auth.setup import AuthMetrics, guard_of, keyring_of
from services.clock import SystemClock
from services.config_reading import load_settings
from services.logs import start_logging
from services.reload import Reloader
from services.rpc.loop import run_service
from services.rpc.server import bind, stop_on_signals
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
from services.scheduler.runner import Runner
from services.scheduler.servicer import SERVICE, SchedulerServicer
from services.scheduler.settings import SchedulerSettings
from services.scheduler.tracing import CreditSpans
from services.telemetry import Telemetry, start_metrics, start_telemetry

log = logging.getLogger("scheduler")

RIGHTS = {
    "Credits": Right(frozenset({Role.SERVICE})),
    "Status": Right(EVERYONE),  # clients for names alone
    "DrainWorker": Right(frozenset({Role.OPERATOR})),
    "UndrainWorker": Right(frozenset({Role.OPERATOR})),
}
"""Which role may call which method of the scheduler."""


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


async def serve(settings: SchedulerSettings, telemetry: Telemetry) -> int:
    """Serve until a signal or a defect; return the exit status."""
    stop = stop_on_signals()
    security = security_of(settings)
    auth = AuthMetrics("scheduler")
    guard = guard_of(keyring_of(settings, SystemClock(), auth), RIGHTS, auth)
    runner = make_runner(settings, telemetry, SchedulerMetrics())
    servicer = SchedulerServicer(runner)
    server = bind(
        settings.listen,
        [SERVICE.full_name],
        lambda grpc_server: add_servicer(SERVICE, servicer, grpc_server, guard=guard),
        security,
        settings.reflection,
    )
    start_metrics(settings.metrics_listen, security.context())
    await server.start()
    link = BacklogLink(settings.queue_address, "scheduler", runner, settings.access)
    reloader = Reloader(settings, "scheduler", lambda changed: runner.feed([Reconfigure(shares_of(changed))]))
    # None of them ends by itself; if one does, it failed.
    loops = [asyncio.create_task(part) for part in (runner.run(), link.run(), reloader.run(), guard.watch())]
    stop_task = asyncio.create_task(stop.wait())
    tell(f"ready: scheduler on {settings.listen.rpartition(':')[0]}:{server.port}", sys.stdout)
    await asyncio.wait([*loops, stop_task], return_when=asyncio.FIRST_COMPLETED)
    status = 0 if stop_task.done() else EX_SOFTWARE
    for ended in loops:
        if ended.done() and (error := ended.exception()) is not None:
            log.critical("the scheduler has failed", exc_info=error)
    runner.stop()
    await server.stop(settings.shutdown_grace_s)
    beside = [*loops, stop_task]
    for task in beside:
        task.cancel()
    await asyncio.gather(*beside, return_exceptions=True)
    return status


def main() -> int:
    """Read settings, serve, and return the exit status."""
    settings = load_settings(SchedulerSettings, "scheduler")
    start_logging(settings.log_level, settings.log_format)
    telemetry = start_telemetry("scheduler")
    try:
        return run_service(serve(settings, telemetry))
    finally:
        telemetry.close()


if __name__ == "__main__":
    sys.exit(main())
