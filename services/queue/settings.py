"""Settings of the queue service."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from penstock.address import DEFAULT_QUEUE_ADDRESS
from services.config import SHUTDOWN_GRACE_S, ChannelledSettings, ListenAddress, Seconds

MOST_INFLIGHT = 2**32 - 1
"""What the protocol's number holds (`WorkOpened.max_inflight`)."""

MOST_BYTES = 2**63 - 1
"""Of a disk: what file systems count with, and metrics can show."""


class QueueSettings(ChannelledSettings):
    """What the queue service can be told."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_QUEUE_", cli_prog_name="services.queue")

    listen: ListenAddress = Field(DEFAULT_QUEUE_ADDRESS, description="HOST:PORT to serve on; port 0 picks a free one.")
    data_dir: Path = Field(Path(".run/queue"), description="Directory of the store; belongs to one process at a time.")
    backup_dir: Path | None = Field(
        None, description="Directory of backups, on the data directory's file system; none means DATA_DIR-backups."
    )
    default_channel: str = Field("interactive", description="Channel of requests that name none.")
    max_attempts: int = Field(3, ge=1, le=1000, description="Attempts before a request becomes a dead letter.")
    lease_s: Seconds = Field(60.0, ge=1, description="Seconds a lease lasts without a renewal.")
    worker_grace_s: Seconds = Field(
        2.0, ge=0, description="Seconds a worker whose stream ended has to return before its leases are requeued."
    )
    max_inflight: int = Field(
        4096,
        ge=1,
        le=MOST_INFLIGHT,
        description="Most leases one worker may hold; beyond what any engine runs at once, so only a runaway meets it.",
    )
    result_ttl_s: Seconds = Field(7 * 24 * 3600.0, gt=0, description="Seconds a result is kept.")
    disk_free_min_bytes: int = Field(
        256 * 1024 * 1024,
        ge=0,
        le=MOST_BYTES,
        description="Submits are refused while the store's disk has less free than this.",
    )

    shutdown_grace_s: Seconds = Field(
        SHUTDOWN_GRACE_S,
        gt=0,
        description="Seconds that calls in flight at SIGTERM get, at most 2; streams end at once.",
    )

    @field_validator("backup_dir", mode="before")
    @classmethod
    def _empty_means_none(cls, value: object) -> object:
        return value or None

    @model_validator(mode="after")
    def _default_channel_exists(self) -> QueueSettings:
        if self.default_channel not in self.channels:
            raise ValueError(
                f"default_channel: {self.default_channel!r} is not one of {', '.join(sorted(self.channels))}"
            )
        return self
