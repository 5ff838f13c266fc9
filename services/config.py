"""Settings shared by the services: where to listen, what to log, which channels exist.

Every setting has four sources; the first that names it wins: command line,
environment (`PENSTOCK_…`), the configuration file (`--config`), default. Names not listed here are refused.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from penstock.address import check_address, check_listening
from penstock.config_file import CONFIG_VARIABLE, NUL_FAULT
from penstock.credentials import Credentials
from penstock.tls import Access, TlsFiles
from services.config_source import Environment, TomlFile
from services.logs import Form

MOST_SECONDS = 1e9
"""Of a duration: thirty years. Nanoseconds of it are still whole numbers of 64 bits, as the wire has them."""

Seconds = Annotated[float, Field(le=MOST_SECONDS)]
"""A duration among settings."""

PeerAddress = Annotated[str, AfterValidator(check_address)]
"""Where another service is, among settings."""

ListenAddress = Annotated[str, AfterValidator(check_listening)]
"""Where a service listens, among settings."""


def check_metrics_address(address: str) -> str:
    """Return where metrics are served; raises ValueError unless one can listen there, or it is empty."""
    return check_listening(address) if address else address


LEAST_WEIGHT, MOST_WEIGHT = 1e-3, 1e3
"""Of a channel: what a turn gives is one weight divided by another, and has to stay a number that can be counted with.
A channel that is to get less than a millionth of another's share belongs into a later tier."""


def no_switch(kind: type[BaseModel], value: object, info: ValidationInfo) -> object:
    """Return the value of a field as it is; raises ValueError for true or false where a number is wanted.

    It would be read as 1 or 0 otherwise.
    """
    if isinstance(value, bool) and kind.model_fields[str(info.field_name)].annotation in (int, float):
        raise ValueError("must be a number, not true or false")
    return value


SHUTDOWN_GRACE_S: Final = 8.0
"""Of a service for which nobody has set another. It fits Docker, whose SIGKILL comes 10 s after SIGTERM: what a worker
still runs is to be handed back before that, or costs each request an attempt."""


class ChannelSettings(BaseModel):
    """One virtual channel: its weight, its guaranteed share, its ceiling and its tier."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch_for_a_number(cls, value: object, info: ValidationInfo) -> object:
        return no_switch(cls, value, info)

    weight: float = Field(
        1.0, ge=LEAST_WEIGHT, le=MOST_WEIGHT, description="Relative share of blocks when every channel has work."
    )
    guaranteed_share: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of a worker's blocks and sequences nobody else may hold while this channel has work.",
    )
    ceiling_share: float = Field(1.0, gt=0, le=1, description="Most of a worker's blocks this channel may hold.")
    tier: int = Field(
        0,
        ge=0,
        le=15,
        description="Channels of a lower tier are served strictly first; only guarantees hold against them.",
    )


def default_channels() -> dict[str, ChannelSettings]:
    """Return the channels of an unconfigured fleet: people first, files behind."""
    return {
        "interactive": ChannelSettings(weight=4.0, guaranteed_share=0.1),
        "batch": ChannelSettings(weight=1.0),
    }


def check_channels(channels: dict[str, ChannelSettings]) -> dict[str, ChannelSettings]:
    """Return `channels`; raises ValueError if there are none or the guarantees exceed the whole."""
    if not channels:
        raise ValueError("at least one channel is needed")
    total = sum(channel.guaranteed_share for channel in channels.values())
    if total > 1 + 1e-9:
        raise ValueError(f"guaranteed_share adds up to {total:.3f}; at most 1 can be guaranteed")
    for name, channel in channels.items():
        if channel.ceiling_share < channel.guaranteed_share:
            raise ValueError(f"channel {name!r}: ceiling_share is below guaranteed_share")
    return channels


class ServiceSettings(BaseSettings):
    """What every service can be told."""

    model_config = SettingsConfigDict(
        extra="forbid",
        allow_inf_nan=False,
        cli_kebab_case=True,
        cli_hide_none_type=True,
        cli_avoid_json=False,
        nested_model_default_partial_update=False,
    )

    config: str = Field(
        "", validation_alias=CONFIG_VARIABLE, description="TOML file with settings; flags and environment override it."
    )
    metrics_listen: Annotated[str, AfterValidator(check_metrics_address)] = Field(
        "", description="HOST:PORT of the Prometheus endpoint; empty means no endpoint."
    )
    log_level: str = Field("info", pattern="^(debug|info|warning|error)$", description="Least severity that is logged.")
    log_format: Form = Field("text", description="Log records as `text` or as `json`, one a line.")
    shutdown_grace_s: Seconds = Field(
        SHUTDOWN_GRACE_S,
        gt=0,
        description="Seconds between SIGTERM and the end of what has not finished. Whatever follows it with SIGKILL "
        "must wait 2 s more (`docker stop` by itself waits 10 s).",
    )
    tls_cert: str = Field(
        "",
        validation_alias="PENSTOCK_TLS_CERT",
        description="PEM file of this process's certificate, for its ports and for its connections to others.",
    )
    tls_key: str = Field("", validation_alias="PENSTOCK_TLS_KEY", description="PEM file of the certificate's key.")
    tls_ca: str = Field(
        "",
        validation_alias="PENSTOCK_TLS_CA",
        description="PEM file of the CA that peers' certificates must be of; empty means the system's.",
    )
    tls_client_auth: bool = Field(
        True,
        validation_alias="PENSTOCK_TLS_CLIENT_AUTH",
        description="With a CA: let in only clients that have a certificate of it (mutual TLS).",
    )
    insecure: bool = Field(
        False,
        validation_alias="PENSTOCK_INSECURE",
        description="Listen without TLS on other addresses than the loopback: whoever can reach the port may do all.",
    )

    key: SecretStr = Field(
        SecretStr(""),
        validation_alias="PENSTOCK_KEY",
        description="API key of this process, of the role `service`, where the fleet has a keys file."
        " Give it in the environment: a command line can be read by others.",
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the sources behind the command line, the first to name a setting before the others."""
        del env_settings, dotenv_settings, file_secret_settings
        return init_settings, Environment(settings_cls), TomlFile(settings_cls, COMMON)

    @property
    def tls_files(self) -> TlsFiles:
        """What connections are made with."""
        return TlsFiles(self.tls_ca, self.tls_cert, self.tls_key)

    @property
    def access(self) -> Access:
        """How connections to other services are opened."""
        return Access(self.tls_files, Credentials(self.key.get_secret_value()))

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch_for_a_number(cls, value: object, info: ValidationInfo) -> object:
        return no_switch(cls, value, info)

    @field_validator("*", mode="before")
    @classmethod
    def _no_nul_in_a_text(cls, value: object) -> object:
        if isinstance(value, str) and "\0" in value:
            raise ValueError(NUL_FAULT)
        return value

    @model_validator(mode="after")
    def _ports_are_guarded(self) -> Self:
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError("tls_cert and tls_key are given together or not at all")
        if self.tls_cert or self.insecure:
            return self
        for name in ("listen", "metrics_listen"):
            address = getattr(self, name, "")
            if address and not is_loopback(address):
                raise ValueError(
                    f"{name}: {address} can be reached from other machines: give a certificate"
                    " (PENSTOCK_TLS_CERT, PENSTOCK_TLS_KEY), or PENSTOCK_INSECURE=true if the network is trusted"
                )
        return self


class GrpcSettings(ServiceSettings):
    """Settings of a service that serves gRPC, as all but the gateway do."""

    reflection: bool = Field(
        False,
        validation_alias="PENSTOCK_REFLECTION",
        description="Serve gRPC reflection, so that grpcurl and friends need no protos.",
    )


COMMON = frozenset(GrpcSettings.model_fields) - {"config", "metrics_listen"}
"""What `[common]` of the file may say for all services, each of which takes what it has; a port only one can have."""


class ChannelledSettings(GrpcSettings):
    """Settings of a service that decides: it knows the virtual channels, and who may do what."""

    keys: Path | None = Field(
        None,
        validation_alias="PENSTOCK_KEYS",
        description="TOML file of API keys and tenants, as `penstock keys` writes it, read again when it changes;"
        " none means that everyone who reaches the port may do all.",
    )

    @field_validator("keys", mode="before")
    @classmethod
    def _empty_means_no_file(cls, value: object) -> object:
        return value or None

    channels: dict[str, ChannelSettings] = Field(
        default_factory=default_channels,
        validation_alias="PENSTOCK_CHANNELS",
        description='Channels as JSON: {"name": {"weight": 1, "guaranteed_share": 0, "ceiling_share": 1, "tier": 0}}.',
    )

    @field_validator("channels")
    @classmethod
    def _channels_fit(cls, value: dict[str, ChannelSettings]) -> dict[str, ChannelSettings]:
        return check_channels(value)


def is_loopback(listen: str) -> bool:
    """Return whether only this machine can reach "HOST:PORT"; an empty host is every address."""
    host = listen.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
