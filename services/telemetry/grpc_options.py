"""Channel options that both ends of every connection share, with the reason for each."""

Options = list[tuple[str, int | str]]


def server_options(max_message_bytes: int) -> Options:
    """Options of a server that takes messages up to `max_message_bytes`."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # A caller whose host has vanished is found within 15 s, and what it held is freed.
        ("grpc.keepalive_time_ms", 10000),
        ("grpc.http2.ping_timeout_ms", 5000),
        # Pings during a long prefill must not earn GOAWAY "too_many_pings".
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 2000),
        ("grpc.keepalive_permit_without_calls", 1),
        # Whoever connects and says nothing is dropped; gRPC's own limit is two minutes.
        ("grpc.server_handshake_timeout_ms", 10000),
        # A second server on the same port is a mistake, not a way to share load.
        ("grpc.so_reuseport", 0),
    ]


def channel_options(max_message_bytes: int, *, silence_timeout_s: float = 1.0) -> Options:
    """Options of a client's channel that takes messages up to `max_message_bytes`.

    A peer that is silent for less than `silence_timeout_s` is not given up.
    """
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # A vanished host is found by pings; the limit that counts is the ping's own timeout. It is
        # twice as long, so that whoever watches for silence decides first.
        ("grpc.keepalive_time_ms", 3000),
        ("grpc.http2.ping_timeout_ms", max(2000, int(2000 * silence_timeout_s))),
        ("grpc.http2.max_pings_without_data", 0),
        # Come back to a restarted peer within a second, not within two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
    ]
