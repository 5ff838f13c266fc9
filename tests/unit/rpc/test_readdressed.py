"""Channels find a peer that has come back under another address."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from penstock import connection
from penstock.limits import BACKOFF_MOST_S, RESOLVE_MS
from services.rpc import limits


@pytest.mark.parametrize("options", [limits.CHANNEL_OPTIONS, connection.CHANNEL_OPTIONS], ids=["services", "clients"])
def test_a_name_is_resolved_anew_before_the_next_attempt_to_connect(options: Sequence[tuple[str, int]]) -> None:
    """The options alone are looked at: to move a name between addresses takes a resolver of the test's own.

    gRPC resolves a name at most every 30 s unless told otherwise. A container that is made anew, or is started after
    others were stopped, has another address; with that default its peers asked the old one for up to half a minute,
    and a gateway answered 503 once its patience of 10 s had run out.
    """
    assert dict(options)["grpc.dns_min_time_between_resolutions_ms"] == RESOLVE_MS <= BACKOFF_MOST_S * 1000
