"""A server's options fit each other."""

from services.transport.grpc_options import ServerLimits, server_options

LIMITS = ServerLimits(
    max_request_bytes=2**22,
    max_connections=16,
    max_streams_per_connection=8,
    max_sessions=6,
    slow_reader_timeout_s=42.5,
)
OPTIONS = dict(server_options(LIMITS, max_send_bytes=2**24))


def test_a_peer_that_is_held_up_is_cut_for_its_unread_output_not_for_its_pings():
    assert OPTIONS["grpc.http2.ping_timeout_ms"] > 1000 * LIMITS.slow_reader_timeout_s


def test_an_unread_stream_keeps_the_smallest_window():
    assert OPTIONS["grpc.http2.bdp_probe"] == 0


def test_a_caller_has_at_least_one_session():
    assert LIMITS.max_sessions_per_caller == 1
