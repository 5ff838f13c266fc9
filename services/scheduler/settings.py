"""What the credit scheduler can be told."""

from __future__ import annotations

from pydantic import Field, field_validator
from pydantic_settings import SettingsConfigDict

from penstock.address import DEFAULT_QUEUE_ADDRESS, DEFAULT_SCHEDULER_ADDRESS
from services.config import ChannelledSettings, ListenAddress, PeerAddress, Seconds
from services.scheduler.core.admission.margin import DEFAULT_TARGET_PER_1000
from services.scheduler.core.admission.policies import DEFAULT_POLICY, POLICIES


class SchedulerSettings(ChannelledSettings):
    """Settings of the credit scheduler; environment names start with PENSTOCK_SCHEDULER_."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_SCHEDULER_", cli_prog_name="services.scheduler")

    listen: ListenAddress = Field(
        DEFAULT_SCHEDULER_ADDRESS, description="HOST:PORT to serve on; port 0 picks a free one."
    )
    queue_address: PeerAddress = Field(
        DEFAULT_QUEUE_ADDRESS, description="Address of the queue service, as gRPC takes it."
    )
    policy: str = Field(DEFAULT_POLICY, description=f"Admission policy: {', '.join(POLICIES)}.")
    epoch_grace_s: Seconds = Field(
        5.0,
        ge=0,
        description="Seconds the credits of a broken worker stream wait for the worker's return, and for which a"
        " scheduler that has started waits for workers. What then only one that is away could hold is rejected, if"
        " smaller ones serve its model.",
    )
    report_interval_ms: int = Field(
        20, ge=1, le=10_000, description="Least time between two engine reports of one worker, in milliseconds."
    )
    sequence_slack: float = Field(
        1.0,
        gt=0,
        le=1_000_000,
        description="Completions reserved on a worker at once, as a multiple of its max_num_seqs;"
        " above 1 some wait inside the engine.",
    )
    standing_grant_s: Seconds = Field(
        2.0,
        ge=0,
        description="Seconds that a grant given before its request stands unused, while nothing waits; 0 gives none.",
    )
    target_preemptions_per_1000: float = Field(
        DEFAULT_TARGET_PER_1000,
        ge=0,
        le=1000,
        description="Policy `predictive`: preemptions per 1,000 requests to steer towards; more if they cost little.",
    )

    @field_validator("policy")
    @classmethod
    def _policy_exists(cls, value: str) -> str:
        if value not in POLICIES:
            raise ValueError(f"no such policy; choose one of {', '.join(POLICIES)}")
        return value
