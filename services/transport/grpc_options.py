"""Channel options that both ends of every connection share, with the reason for each."""

from dataclasses import dataclass, field

from services.transport.message_limits import MessageLimits

Options = list[tuple[str, int | str]]


IDLE_CONNECTION_S = 60
"""A connection without calls is closed after this, even if it answers pings. gRPC's timer runs
a second time after a call, so that it may take twice as long. Clients of gRPC connect again by
themselves when they next call."""
KEEPALIVE_S = 10
"""A connection that is silent for this long is pinged."""
SETTINGS_TIMEOUT_S = 5
"""Time that a peer has to acknowledge the server's HTTP/2 settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Limits of what callers of a server open and send."""

    max_request_bytes: int
    """Largest message taken."""
    max_connections: int
    """Connections taken at a time; more are closed at once."""
    max_streams_per_connection: int
    """Calls of one connection; more wait at its other end."""
    max_sessions: int
    """Streams of requests open at a time."""
    message: MessageLimits = field(default_factory=MessageLimits)
    """Limits of one message."""
    slow_reader_timeout_s: float
    """Time for which a caller may leave its output unread."""
    shares_port: bool = False
    """Whether other processes take callers on the same port."""

    @property
    def ping_timeout_s(self) -> float:
        """Time that a peer has to answer a ping."""
        return self.slow_reader_timeout_s + 5

    @property
    def max_sessions_per_caller(self) -> int:
        """Streams of requests that one caller may have open: a quarter."""
        return max(1, self.max_sessions // 4)


def server_options(limits: ServerLimits, *, max_send_bytes: int) -> Options:
    """Options of a server that takes what `limits` allow and sends up to `max_send_bytes`."""
    return [
        ("grpc.max_receive_message_length", limits.max_request_bytes),
        ("grpc.max_send_message_length", max_send_bytes),
        ("grpc.max_allowed_incoming_connections", limits.max_connections),
        # Before a peer acknowledges our settings it is held to the defaults of HTTP/2: 16 MiB of
        # metadata, by references to 4 KiB of headers, for each call that this allows.
        ("grpc.max_concurrent_streams", limits.max_streams_per_connection),
        ("grpc.http2.settings_timeout", 1000 * SETTINGS_TIMEOUT_S),
        # Without the probe an unread stream holds 64 KiB; with it, 4 MiB and more. A stream whose
        # message is being read gets a larger window for it in either case.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.max_connection_idle_ms", 1000 * IDLE_CONNECTION_S),
        # A caller whose host has vanished is found by pings, and what it held is freed. One that
        # is only held up does not answer them either, so they wait longer than output does.
        ("grpc.keepalive_time_ms", 1000 * KEEPALIVE_S),
        ("grpc.http2.ping_timeout_ms", int(1000 * limits.ping_timeout_s)),
        # Pings during a long prefill must not earn GOAWAY "too_many_pings".
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 2000),
        ("grpc.keepalive_permit_without_calls", 1),
        # A connection that sends nothing is dropped; gRPC's own limit is two minutes.
        ("grpc.server_handshake_timeout_ms", 10000),
        # A second server on the same port is a mistake, unless the service says otherwise.
        ("grpc.so_reuseport", int(limits.shares_port)),
    ]


def channel_options(max_message_bytes: int, *, silence_timeout_s: float = 1.0) -> Options:
    """Options of a client's channel that takes messages up to `max_message_bytes`.

    A peer that is silent for less than `silence_timeout_s` is not given up.
    """
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # A vanished host is found by pings; the limit that counts is the ping's own timeout. It is
        # twice as long, so that the caller's own limit on silence applies first.
        ("grpc.keepalive_time_ms", 3000),
        ("grpc.http2.ping_timeout_ms", max(2000, int(2000 * silence_timeout_s))),
        ("grpc.http2.max_pings_without_data", 0),
        # Come back to a restarted peer within a second, not within two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
    ]
