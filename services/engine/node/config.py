"""Configuration of a node."""

import os
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from services.engine.config.parallel import LOOPBACK_INTERFACE
from services.engine.config.serving import is_loopback
from services.settings.addresses import bracketed, checked_address

VARIABLE_PREFIX = "OCTAVO_NODE_"
"""Of environment variables that are settings."""
_NUMBER_VARIABLES = ("NODE_RANK", "GROUP_RANK")


class NodeConfig(BaseSettings):
    """Runs ranks of an Octavo engine on this host, with the engine's settings.

    Each option is a flag (--head HOST:PORT) and an environment variable (OCTAVO_NODE_HEAD); the
    flag wins. The model must be at the engine's path on this host, too.
    """

    model_config = SettingsConfigDict(
        env_prefix=VARIABLE_PREFIX,
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        cli_prog_name="octavo worker-node",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        cli_exit_on_error=False,
    )

    head: str = ""
    """The engine, as host:port; MASTER_ADDR and MASTER_PORT when absent."""
    node_rank: int | None = Field(default=None, ge=1)
    """Number of this host, from 1 on; NODE_RANK, GROUP_RANK or the first free one when absent."""
    interface: str = LOOPBACK_INTERFACE
    """Network interface of this host on which its ranks meet those of other hosts."""
    secret_file: Path | None = None
    """File with the secret that the engine has as --node-secret-file."""
    tls_ca: Path | None = None
    """Authorities (PEM) of the engine's certificate; plain text when absent."""
    tls_cert: Path | None = None
    """Certificate (PEM) to show to the engine."""
    tls_key: Path | None = None
    """Private key (PEM) of --tls-cert."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe line that is logged; ranks have the engine's."""
    log_format: Literal["auto", "console", "json"] = "auto"
    """How lines look; auto means console on a terminal and json elsewhere."""

    @model_validator(mode="before")
    @classmethod
    def _follow_torchrun(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Takes from torchrun's variables what is not said otherwise."""
        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        numbers = [os.environ[name] for name in _NUMBER_VARIABLES if name in os.environ]
        found: dict[str, Any] = {"node_rank": numbers[0]} if numbers else {}
        if host and port:
            found["head"] = f"{bracketed(host)}:{port}"
        return found | values

    @model_validator(mode="after")
    def _check_head(self) -> Self:
        """Refuses a head without an address, or one that this host could not know."""
        if not self.head:
            raise ValueError("--head is absent: it is needed, or MASTER_ADDR and MASTER_PORT")
        try:
            checked_address(self.head)
        except ValueError as error:
            raise ValueError(f"--head: {error}") from None
        if is_loopback(self.head.rpartition(":")[0]):
            return self
        if self.secret_file is None and self.tls_ca is None:
            raise ValueError(
                "a head off loopback needs --secret-file or --tls-ca, so that only your engine "
                "gives orders"
            )
        if self.interface == LOOPBACK_INTERFACE:
            raise ValueError(
                "a head off loopback needs --interface, on which other hosts reach this one"
            )
        return self
