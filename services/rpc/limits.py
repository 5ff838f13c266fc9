"""Limits of every stream of a service, each with its reason; what clients keep to as well is in `penstock.limits`."""

from __future__ import annotations

from penstock.limits import (
    BACKOFF_FIRST_S,
    BACKOFF_MOST_S,
    KEEPALIVE_TIME_MS,
    KEEPALIVE_TIMEOUT_MS,
    MAX_MESSAGE_BYTES,
    PING_TIMEOUT_MS,
    RESOLVE_MS,
)
from penstock.tls import DIRECT

MAX_UNSENT_MESSAGES = 16_384
"""Unsent messages of one stream from which on its peer is read no further: each answers something the peer said, so
one who does not read cannot go on asking. More than all a worker can have under way (`max_inflight` claims, completions
and renewals)."""

MAX_UNSENT_BYTES = 256 * 1024 * 1024
"""Unsent bytes of one stream, unasked-for messages included, at which it is ended and all of it dropped; a peer that
comes back is told everything anew. Over a million announcements: no window of a fleet that reads comes near it."""

MAX_UNSENT_PAYLOAD_BYTES = 8 * 1024 * 1024
"""Unsent bytes of one stream from which on further prompts stay in the store until there is room to send them."""

MAX_METADATA_BYTES = 16 * 1024
"""Request headers; a W3C trace context and a few tenant headers take well under 1 KiB."""

MAX_STREAMS = 1024
"""Open calls of one connection; a client with more waits for one of its own to end. A call takes about 30 KiB."""

MAX_CALLS_OF_HOST = 4096
"""Open calls of one host over all its connections; those beyond are refused."""

MAX_KEYLESS_CALLS_OF_HOST = 256
"""Open calls of one host to the health service, and as many to reflection, which ask for no key: more than the probes
of any machine. With all its other calls a host stays below MAX_CALLS."""

MAX_HEALTH_WATCHES_OF_HOST = 64
"""Of those, watches of health, which stay open: the rest is left for checks, which are answered at once."""

MAX_CALLS = 8192
"""Open calls of all hosts together, which bounds the memory they take: no one host can have them all."""

MAX_PENDING_CALLS = 16_384
"""Calls that have arrived and wait to be looked at. Beyond gRPC's own 1,000 it cancels calls at random, also those of
clients who mean well; a burst of calls that will be refused must not reach that."""

MAX_CONNECTIONS = 1024
"""Connections of all hosts together, refused or not: each takes a file descriptor, which the store needs too."""

FIRST_MESSAGE_S = 30.0
"""A call that has said nothing for so long is ended: every call of the protocol begins by saying something."""

HANDSHAKE_MS = 10_000
"""A connection that has not introduced itself by then is closed."""

PING_INTERVAL_MS = KEEPALIVE_TIME_MS // 4
"""A connection whose pings come in a row with less between them is closed (`too_many_pings`), calls or none: four times
as many are taken as clients are told to send, and Go and Java send none closer than twice this."""

IDLE_CONNECTION_MS = 600_000
"""A connection without a call is closed after this; a client opens another one without its caller's noticing."""

PING_TIMEOUT_OF_SERVICES_MS = 10_000
"""In the place of PING_TIMEOUT_MS where one service calls another: they are near each other, and a stopped one is to be
noticed soon."""

CONNECT_S = 0.5
"""Longest the first attempts to connect may take, later ones as long as the pause after them: four round trips with
TLS, and a link that loses what is sent is tried several times within the queue's worker_grace_s."""

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    DIRECT,
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_OF_SERVICES_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Reconnect pauses of the channel itself; without these gRPC waits up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", int(BACKOFF_FIRST_S * 1000)),
    ("grpc.min_reconnect_backoff_ms", int(CONNECT_S * 1000)),  # in spite of its name
    ("grpc.max_reconnect_backoff_ms", int(BACKOFF_MOST_S * 1000)),
    ("grpc.dns_min_time_between_resolutions_ms", RESOLVE_MS),
]

SERVER_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Nothing compressed: 12 KiB on the wire would be 12 MiB here, and what bounds a sender is what it has to send.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", 2 * MAX_METADATA_BYTES),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
    ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
    ("grpc.max_connection_idle_ms", IDLE_CONNECTION_MS),
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),  # workers, clients and gateways come to the same port
    ("grpc.http2.min_ping_interval_without_data_ms", PING_INTERVAL_MS),
    # Without it gRPC takes one ping in two hours of a connection that has no call just then, and closes it after three
    # more. The service asks after such a connection too, and has its place back when the host has vanished.
    ("grpc.keepalive_permit_without_calls", 1),
    # Two servers on one port would share clients at random; the second must fail to start.
    ("grpc.so_reuseport", 0),
]
