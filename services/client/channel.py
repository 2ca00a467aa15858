"""Connections to the services."""

import grpc

MAX_MESSAGE_BYTES = 64 * 2**20
"""Largest message taken; the servers' own limits are lower and answer with a clear error."""


def open_channel(address: str) -> grpc.aio.Channel:
    """Returns a channel to `address` (host:port); it connects when first used."""
    return grpc.aio.insecure_channel(
        address,
        options=[
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            # A vanished host is found by pings within seconds; TCP alone takes minutes.
            ("grpc.keepalive_time_ms", 10_000),
            ("grpc.http2.ping_timeout_ms", 5_000),
            # Come back to a restarted server within a second, not within two minutes.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1_000),
        ],
    )
