"""Base of the sections of a configuration."""

from pydantic import BaseModel, ConfigDict


class ConfigSection(BaseModel):
    """Settings that belong together; each field is a flag, and its docstring the flag's help."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=()
    )
