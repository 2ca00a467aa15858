"""The flags that an engine and a frontend have, for commands that pass them on."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pydantic.fields import FieldInfo

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


def _flags(fields: Iterable[tuple[str, FieldInfo]]) -> Flags:
    return {name.replace("_", "-"): field.annotation is bool for name, field in fields}
