"""The flags that an engine and a frontend have, for commands that pass them on."""

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic.fields import FieldInfo

from services.client.supervisor import ServiceFailedError
from services.settings.flags import UsageError

Flags = Mapping[str, bool]
"""Name of a flag, without its dashes -> whether it is a switch, which takes no value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceFlags:
    """The flags of both services."""

    engine: Flags
    frontend: Flags

    @classmethod
    def read(cls) -> "ServiceFlags":
        """Returns the flags that the services' configurations have."""
        # They take a while to import.
        from services.engine.config.engine_config import EngineConfig
        from services.frontend.config import FrontendConfig

        sections = EngineConfig.sections().values()
        return cls(
            engine=_flags(item for section in sections for item in section.model_fields.items()),
            frontend=_flags(FrontendConfig.model_fields.items()),
        )


def check_arguments(*, engine: Sequence[str], frontend: Sequence[str]) -> None:
    """Checks what the services get, in their own words, before one of them loads a model.

    Raises:
        UsageError: one is no flag, a value is out of bounds, or a file of the frontend cannot be
            used.
        SystemExit: an argument requests help.
    """
    from services.engine.config.engine_config import EngineConfig
    from services.engine.config.flags import read_command_line
    from services.frontend.command import check_files, read_config

    try:
        service = "frontend"
        check_files(read_config(frontend))
        service = "engine"
        read_command_line(EngineConfig, engine)
    except UsageError as error:
        problems = "; ".join(str(error).splitlines())
        raise UsageError(f"the {service}'s flags: {problems}") from None


def served_name(engine_words: Sequence[str]) -> str:
    """Returns the name under which an engine with these flags serves its model."""
    from services.engine.config.engine_config import EngineConfig
    from services.engine.config.flags import read_command_line

    return read_command_line(EngineConfig, engine_words).checkpoint.model_name


def read_flags(
    words: Sequence[str], owner: str, **flags: tuple[Callable[[str], Any], str | None]
) -> argparse.Namespace:
    """Returns some flags of a service, of which its words may have more.

    Args:
        words: its arguments.
        owner: its name, for messages.
        flags: by name, what each value is made with, and the default.

    Raises:
        ServiceFailedError: a value is malformed.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name, (kind, default) in flags.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default)
    try:
        return parser.parse_known_args(words)[0]
    except argparse.ArgumentError as error:
        raise ServiceFailedError(f"the {owner}'s flags: {error}", exit_code=2) from None


def _flags(fields: Iterable[tuple[str, FieldInfo]]) -> Flags:
    return {name.replace("_", "-"): field.annotation is bool for name, field in fields}
