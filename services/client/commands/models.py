"""`octavo models`: what is served."""

from rich.table import Table

from services.client.calls import ask_frontend
from services.client.channel import Access
from services.client.console import TerminalConsole
from services.client.flags import DEFAULT_FRONTEND, FrontendAddress, TimeoutSeconds


def models(
    *,
    frontend: FrontendAddress = DEFAULT_FRONTEND,
    timeout_s: TimeoutSeconds = 10.0,
    access: Access,
) -> None:
    """Lists the models that requests may name, with their limits and default sampling."""
    cards = ask_frontend(frontend, access, lambda each: each.list_models(timeout_s=timeout_s))
    table = Table("model", "architecture", "context", "ready", "default sampling")
    for card in cards:
        sampling = " ".join(f"{name}={value:g}" for name, value in card.default_sampling.items())
        ready = "yes" if card.ready else "no"
        table.add_row(card.name, card.architecture, str(card.max_model_len), ready, sampling)
    TerminalConsole().print(table)
