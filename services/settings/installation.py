"""The installation: its version, and which optional extras it has."""

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

MODULES = {
    "frontend": ("PIL", "httptools", "jinja2", "starlette", "tokenizers", "uvicorn"),
    "engine": ("huggingface_hub", "llguidance", "regex", "safetensors", "torch"),
    "tracing": ("opentelemetry.exporter.otlp.proto.grpc", "opentelemetry.sdk"),
    "transformers": ("transformers",),
    "gateway": ("smg_grpc_proto",),
}
"""Extra of pyproject.toml -> modules that its packages have."""


class MissingExtraError(ValueError):
    """Packages of extras are not installed; the message names both."""


def own_version() -> str:
    """Returns Octavo's version, or "source" of a checkout that was not installed."""
    try:
        return version("octavo")
    except PackageNotFoundError:
        return "source"


def require_extras(*extras: str) -> None:
    """Checks that extras are installed, without importing their packages.

    Raises:
        MissingExtraError: a package is missing.
    """
    missing = {extra: modules for extra in extras if (modules := list(_missing(extra)))}
    if not missing:
        return
    modules = [module for of_one in missing.values() for module in of_one]
    names = ",".join(missing)
    are = "is" if len(modules) == 1 else "are"
    extras_bring = f"extra `{names}` brings" if len(missing) == 1 else f"extras `{names}` bring"
    raise MissingExtraError(
        f"{', '.join(modules)} {are} not installed; the {extras_bring} what is "
        f"missing: pip install '.[{names}]' in a clone, pip install 'FILE.whl[{names}]' with a "
        "wheel"
    )


def _missing(extra: str) -> Iterator[str]:
    for module in MODULES[extra]:
        try:
            is_there = find_spec(module) is not None
        except ModuleNotFoundError:  # of its parent
            is_there = False
        if not is_there:
            yield module
