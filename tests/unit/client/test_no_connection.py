"""What the client says of an address at which somebody is, and of one at which nobody is."""

from __future__ import annotations

import re

import grpc
import pytest

import penstock
from penstock.errors import NobodyAnswers, from_rpc

HANDSHAKE = "Tls handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:1000007d:SSL routines:{}: reason: OK"


@pytest.mark.parametrize(
    ("last_error", "says", "somebody"),
    [
        ("Connection refused", "nothing answers on there", False),
        ("Socket closed", "there closes connections at once .*: Socket closed; does it ask for TLS", True),
        (
            HANDSHAKE.format("WRONG_VERSION_NUMBER"),
            "there does not answer in TLS .*; does it serve in plain text",
            True,
        ),
        (
            "INTERNAL: Failed parsing HTTP/2 (Trying to connect an http1.x server (HTTP status 400))",
            "there speaks HTTP/1.1, not gRPC .* is it the gateway's port",
            True,
        ),
        (HANDSHAKE.format("CERTIFICATE_VERIFY_FAILED"), "there has a certificate that is not trusted here", True),
        (
            HANDSHAKE.format("CERTIFICATE_VERIFY_FAILED: unsupported certificate purpose"),
            "there has a client's certificate, not a service's",
            True,
        ),
        (HANDSHAKE.format("TLSV1_ALERT_UNKNOWN_CA"), "there does not come to terms about TLS", True),
        ("UNAUTHENTICATED: Hostname Verification Check failed.", "there has a certificate for other names", True),
    ],
)
def test_one_with_whom_there_is_no_connection_is_somebody(last_error: str, says: str, somebody: bool) -> None:
    """As a service with TLS is for one that comes in plain text: no service has to be started for it."""
    details = f"failed to connect to all addresses; last error: UNAVAILABLE: ipv4:127.0.0.1:1: {last_error}"
    metadata = grpc.aio.Metadata()
    error = from_rpc(grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, metadata, metadata, details), "there")
    assert isinstance(error, penstock.Unavailable)
    assert isinstance(error, NobodyAnswers) is not somebody
    assert re.match(says, str(error))
