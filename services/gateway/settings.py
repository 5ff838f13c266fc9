"""What the gateway can be told."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from penstock.address import DEFAULT_QUEUE_ADDRESS, DEFAULT_SCHEDULER_ADDRESS
from services.config import ListenAddress, PeerAddress, Seconds, ServiceSettings
from services.gateway.core.batch import MOST_LEASE_S


class GatewaySettings(ServiceSettings):
    """Settings of the gateway; environment names start with PENSTOCK_GATEWAY_."""

    model_config = SettingsConfigDict(
        **{**ServiceSettings.model_config, "env_prefix": "PENSTOCK_GATEWAY_", "cli_prog_name": "services.gateway"}
    )

    @property
    def has_credentials(self) -> bool:
        """Whether the gateway can prove to the queue that it is a service, as it must where there are keys."""
        return bool(self.key.get_secret_value() or self.tls_cert)

    listen: ListenAddress = Field(
        "127.0.0.1:7415",
        description="HOST:PORT to serve HTTP on; port 0 picks a free one.",
    )
    queue_address: PeerAddress = Field(DEFAULT_QUEUE_ADDRESS, description="HOST:PORT of the queue.")
    scheduler_address: PeerAddress = Field(
        DEFAULT_SCHEDULER_ADDRESS, description="HOST:PORT of the scheduler, asked for the models served."
    )
    queue_patience_s: Seconds = Field(
        10.0,
        ge=0,
        description="Seconds an unreachable queue is waited for before a client is answered 503 or its stream ends;"
        " a supervised one is back within seconds.",
    )
    console: bool = Field(True, description="Serve the console at /.")
    console_hosts: list[str] = Field(
        [],
        description="Host names the console is served as, as a JSON list; addresses and localhost always are.",
    )
    body_timeout_s: Seconds = Field(30.0, gt=0, description="Seconds a client may take to send a request's body.")
    head_timeout_s: Seconds = Field(10.0, gt=0, description="Seconds a client may take to send a request's headers.")
    max_file_bytes: int = Field(
        512 * 1024 * 1024,
        ge=1,
        le=4 * 1024 * 1024 * 1024,
        description="Largest file that is taken; OpenAI takes 200 MB for a batch. The queue keeps none above 4 GiB.",
    )
    batch_lease_s: Seconds = Field(
        10.0,
        ge=0.5,
        le=MOST_LEASE_S,
        description="Seconds after which another gateway goes on with the batches of one that was killed;"
        " the clocks of gateways must differ by less.",
    )
