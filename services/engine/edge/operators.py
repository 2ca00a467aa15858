"""Calls that only operators may make."""

from services.engine.config.serving import ServingConfig, is_loopback
from services.engine.errors import NotPermittedError


def check_knows_callers(config: ServingConfig) -> None:
    """Refuses operators' calls of all callers if any host may call.

    Raises:
        NotPermittedError: the engine listens beyond loopback and asks for no certificates.
    """
    if not is_loopback(config.host) and config.tls_client_ca is None:
        raise NotPermittedError(
            "the engine listens beyond loopback without --tls-client-ca; its adapters and weights "
            "are neither shown nor changed, and it does not sleep"
        )
