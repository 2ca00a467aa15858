"""Serving: the address, certificates, and limits of connections and sessions."""

import ipaddress
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from services.engine.config.section import ConfigSection
from services.settings.addresses import bracketed
from services.settings.flags import MAX_INT32, MAX_WAIT_S
from services.settings.installation import require_extras


def _with_stubs(is_wanted: bool) -> bool:
    if is_wanted:
        require_extras("gateway")
    return is_wanted


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address to listen on."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


VllmGrpc = Annotated[bool, AfterValidator(_with_stubs)]


class ServingConfig(ConfigSection):
    """Address, certificates, and limits of connections and sessions."""

    host: Annotated[str, AfterValidator(bracketed)] = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=50051, ge=0, le=65535)
    """Port to listen on; 0 takes a free one and logs it."""
    tls_cert: Path | None = None
    """Certificate (PEM) to serve with, read again when it changes; plain text when absent."""
    tls_key: Path | None = None
    """Private key (PEM) of --tls-cert."""
    tls_client_ca: Path | None = None
    """Authorities (PEM) of frontends; with it, clients without their certificate are refused."""
    tls_allowed_clients: list[str] = Field(default=[])
    """Names (SAN or CN) of certificates that may call; every one of --tls-client-ca if empty."""
    max_connections: int = Field(default=256, ge=1, le=MAX_INT32)
    """Connections taken at a time; more are closed at once."""
    max_streams_per_connection: int = Field(default=256, ge=1, le=MAX_INT32)
    """Calls that one connection may have open; more wait at the frontend."""
    max_sessions: int = Field(default=256, ge=1, le=MAX_INT32)
    """Sessions of frontends open at a time; one address may have a quarter."""
    max_message_bytes: int = Field(default=16 * 2**20, ge=2**16, le=MAX_INT32)
    """Largest gRPC message taken."""
    vllm_grpc: VllmGrpc = False
    """Serve vllm.grpc.engine.VllmEngine too, on the same port, for gateways that speak it."""
    openengine_grpc: bool = False
    """Serve openengine.v1 too, on the same port, for orchestrators such as Dynamo."""
    allow_watch_tokens: bool = False
    """Let WatchSteps show token ids."""
    heartbeat_interval_ms: int = Field(default=500, ge=50, le=2000)
    """Longest silence on a session."""
    credit_window: int = Field(default=64, ge=1, le=MAX_INT32)
    """Step messages a session may leave unread before steps are merged."""
    slow_reader_timeout_s: float = Field(default=10.0, gt=0, le=MAX_WAIT_S)
    """A reader that takes nothing for this long while output waits loses its requests."""
    drain_timeout_s: float = Field(default=30.0, ge=0, le=MAX_WAIT_S)
    """Time that running requests have to finish after SIGTERM or Drain."""
