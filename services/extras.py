"""The optional extras of the installation: which packages each brings, and which are missing."""

from collections.abc import Iterator
from importlib.util import find_spec

MODULES = {
    "frontend": ("httptools", "jinja2", "starlette", "tokenizers", "uvicorn"),
    "engine": ("huggingface_hub", "llguidance", "regex", "safetensors", "torch"),
    "tracing": ("opentelemetry.exporter.otlp.proto.grpc", "opentelemetry.sdk"),
    "transformers": ("transformers",),
    "gateway": ("smg_grpc_proto",),
}
"""Extra of pyproject.toml -> modules that its packages have."""


class MissingExtraError(ValueError):
    """Packages of an extra are not installed; the message names both."""


def require_extra(extra: str) -> None:
    """Checks that an extra is installed, without importing its packages.

    Raises:
        MissingExtraError: a package is missing.
    """
    missing = list(_missing(extra))
    if not missing:
        return
    verb = "is" if len(missing) == 1 else "are"
    raise MissingExtraError(
        f"{', '.join(missing)} {verb} not installed; the extra `{extra}` brings what is missing: "
        f"pip install '.[{extra}]' in a clone, pip install 'FILE.whl[{extra}]' with a wheel"
    )


def _missing(extra: str) -> Iterator[str]:
    for module in MODULES[extra]:
        try:
            is_there = find_spec(module) is not None
        except ModuleNotFoundError:  # of its parent
            is_there = False
        if not is_there:
            yield module
