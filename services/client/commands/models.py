"""`octavo models`: what is served."""

import asyncio

from rich.table import Table

from services.client.channel import Access
from services.client.client import OctavoClient
from services.client.console import TerminalConsole
from services.client.flags import DEFAULT_FRONTEND, FrontendAddress, TimeoutSeconds
from services.client.responses import ModelCard


def models(
    *,
    frontend: FrontendAddress = DEFAULT_FRONTEND,
    timeout_s: TimeoutSeconds = 10.0,
    access: Access,
) -> None:
    """Lists the models that requests may name, with their limits and default sampling."""
    cards = asyncio.run(_list(frontend, access, timeout_s))
    table = Table("model", "architecture", "context", "ready", "default sampling")
    for card in cards:
        sampling = " ".join(f"{name}={value:g}" for name, value in card.default_sampling.items())
        ready = "yes" if card.ready else "no"
        table.add_row(card.name, card.architecture, str(card.max_model_len), ready, sampling)
    TerminalConsole().print(table)


async def _list(address: str, access: Access, timeout_s: float | None) -> list[ModelCard]:
    async with OctavoClient(address, access=access) as client:
        return await client.list_models(timeout_s=timeout_s)
