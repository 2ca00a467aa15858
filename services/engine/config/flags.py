"""Reads a configuration from the command line and the environment."""

import argparse
import json
from collections.abc import Sequence
from inspect import cleandoc
from typing import Any, TypeVar, get_args, get_origin

from pydantic import ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    CliApp,
    CliSettingsSource,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from services.engine.config.engine_config import EngineConfig
from services.settings.flags import CLI_PREFIX, UsageError, reason_of

VARIABLE_PREFIX = "OCTAVO_ENGINE_"
"""Of environment variables that are settings."""

Config = TypeVar("Config", bound=EngineConfig)


class VariableError(Exception):
    """An environment variable cannot be read; the message has its name and the reason.

    No ValueError: pydantic-settings would replace or ignore it.
    """


def read_flags(kind: type[Config], arguments: Sequence[str]) -> Config:
    """Returns the configuration from arguments and environment variables.

    A field has the same flag and variable in any section: --max-num-seqs and
    OCTAVO_ENGINE_MAX_NUM_SEQS. Help lists the flags by section.

    Raises:
        ValidationError: a value is out of bounds.
        SettingsError: an argument is no flag, or is a list or an object that cannot be read.
        VariableError: a variable that is one cannot.
        SystemExit: an argument requests help.
    """
    sections = kind.sections()
    fields: dict[str, Any] = {
        flag: (field.annotation, field)
        for section in sections.values()
        for flag, field in section.model_fields.items()
    }
    # Python 3.13 removes the docstring's indentation by itself; help shows it as it is.
    document = cleandoc(kind.__doc__ or "")
    flags = create_model(kind.__name__, __base__=_Flags, __doc__=document, **fields)
    section_of = {flag: name for name, each in sections.items() for flag in each.model_fields}
    groups: dict[str, argparse._ArgumentGroup] = {}

    def add_argument(parser: argparse.ArgumentParser, *names: str, **options: Any) -> None:
        """Adds a flag to the group of its section, and --help to the parser."""
        section = section_of.get(options.get("dest") or names[0])
        if section is None:
            parser.add_argument(*names, **options)
            return
        if section not in groups:
            groups[section] = parser.add_argument_group(section, sections[section].__doc__)
        groups[section].add_argument(*names, **options)

    source = CliSettingsSource[BaseSettings](
        flags,
        cli_prog_name=kind.program,
        cli_exit_on_error=False,
        add_argument_method=add_argument,
    )
    given = CliApp.run(flags, cli_args=list(arguments), cli_settings_source=source)
    return kind.from_flags(**{flag: getattr(given, flag) for flag in given.model_fields_set})


def read_command_line(kind: type[Config], arguments: Sequence[str]) -> Config:
    """Returns the configuration from arguments and environment variables, as `read_flags` does.

    Raises:
        UsageError: one is no flag, they cannot be read, or a value is out of bounds.
        SystemExit: an argument requests help.
    """
    try:
        return read_flags(kind, arguments)
    except ValidationError as error:
        raise UsageError("\n".join(describe_problems(kind, error))) from error
    except (SettingsError, VariableError) as error:  # no flag, list or JSON
        raise UsageError(str(error).removeprefix(CLI_PREFIX)) from error


def describe_problems(kind: type[EngineConfig], error: ValidationError) -> list[str]:
    """Returns a line for each problem of a configuration, with its flag where it has one."""
    lines = []
    for problem in error.errors():
        # Values are checked first as flags, then in their section, then all together.
        names = (str(name) for name in problem["loc"] if name not in kind.model_fields)
        flag = next(names, None)
        place = f"--{flag.replace('_', '-')} is {problem['input']!r}: " if flag else ""
        lines.append(place + reason_of(problem))
    return lines


class _Variables(EnvSettingsSource):
    """Environment variables. A list is JSON or, as in flags, has commas between its items."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        """Returns the list or object that a variable holds."""
        text, takes_lists = value.strip(), _takes_lists(field.annotation)
        if takes_lists and not text.startswith(("[", "{")):
            return [item.strip() for item in text.split(",")]
        try:
            return json.loads(text)
        except ValueError as error:
            wanted = "a JSON list, or items with commas between" if takes_lists else "JSON"
            name = f"{VARIABLE_PREFIX}{field_name.upper()}"
            raise VariableError(f"{name} is {text!r}: it must be {wanted}: {error}") from None


def _takes_lists(annotation: Any) -> bool:
    """Whether a list is among the forms of a value."""
    return get_origin(annotation) is list or any(map(_takes_lists, get_args(annotation)))


class _Flags(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix=VARIABLE_PREFIX,
        frozen=True,
        extra="forbid",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        cli_shortcuts={"cudagraph-capture-sizes": "capture-sizes"},
        protected_namespaces=(),
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Reads variables in our own way."""
        del env_settings, dotenv_settings, file_secret_settings
        return init_settings, _Variables(settings_cls)
