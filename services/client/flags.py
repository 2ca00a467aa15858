"""Command-line flags that commands share, and flags made from dataclasses."""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from services.client.requests import Options
from services.client.structured_output import Structure
from services.settings.addresses import checked_address

DEFAULT_FRONTEND = "127.0.0.1:50050"
DEFAULT_ENGINE = "127.0.0.1:50051"


def checked(address: str | None) -> str | None:
    """Returns the value of a flag or argument that is an address of gRPC.

    Raises:
        typer.BadParameter: it cannot be dialled.
    """
    try:
        return address and checked_address(address)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


FrontendAddress = Annotated[
    str,
    typer.Option(
        "--frontend",
        envvar="OCTAVO_FRONTEND",
        callback=checked,
        help="The frontend, as host:port.",
    ),
]
EngineAddress = Annotated[
    str,
    typer.Option(
        "--engine",
        envvar="OCTAVO_ENGINE",
        callback=checked,
        help="The engine, as host:port.",
    ),
]
TimeoutSeconds = Annotated[
    float | None, typer.Option("--timeout-s", min=0, help="Give up after this many seconds.")
]


def expand_dataclasses(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command one flag for each documented field of its dataclass parameters.

    A field is documented by a text in its annotation: `Annotated[int, "How many."] = 1`. Fields
    that are dataclasses themselves are expanded too. A class with an ENV_PREFIX has environment
    variables beside its flags.
    """
    signature = inspect.signature(command)
    expanded = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if is_dataclass(parameter.annotation)
    }

    @functools.wraps(command)
    def run(**values: Any) -> None:
        for name, kind in expanded.items():
            try:
                values[name] = _build(kind, values)
            except ValueError as error:
                raise typer.BadParameter(str(error)) from None
        command(**values)

    plain = [p for name, p in signature.parameters.items() if name not in expanded]
    flags = [flag for kind in expanded.values() for flag in _flags(kind)]
    parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in [*plain, *flags]
    ]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # read by inspect
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def structured(options: Options, structure: Structure) -> Options:
    """Returns options with the output that flags ask for; a mistake ends the command."""
    try:
        wanted = structure.read()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return replace(options, sampling=replace(options.sampling, structured_output=wanted))


def _flags(kind: Any) -> Iterator[inspect.Parameter]:
    """Yields a parameter for each documented field, under a panel named like the class."""
    hints = get_type_hints(kind, include_extras=True)
    prefix = getattr(kind, "ENV_PREFIX", None)
    for item in fields(kind):
        hint = hints[item.name]
        if is_dataclass(hint):
            yield from _flags(hint)
        elif get_origin(hint) is Annotated:
            value_type, text = get_args(hint)
            default = [] if item.default == () else item.default
            option = typer.Option(
                help=text,
                rich_help_panel=kind.__name__,
                envvar=None if prefix is None else prefix + item.name.upper(),
            )
            yield inspect.Parameter(
                item.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if default is MISSING else default,
                annotation=Annotated[_as_list(value_type), option],
            )


def _as_list(value_type: Any) -> Any:
    if get_origin(value_type) is Sequence:
        return list[get_args(value_type)[0]]  # type: ignore[misc]  # built at run time for typer
    return value_type


def _build(kind: Any, values: dict[str, Any]) -> Any:
    """Takes a dataclass's fields out of `values` and makes it."""
    hints = get_type_hints(kind, include_extras=True)
    own = {}
    for item in fields(kind):
        if is_dataclass(hints[item.name]):
            own[item.name] = _build(hints[item.name], values)
        elif item.name in values:
            own[item.name] = values.pop(item.name)
    return kind(**own)
