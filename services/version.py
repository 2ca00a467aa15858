"""The version of Octavo that runs."""

from importlib.metadata import PackageNotFoundError, version


def own_version() -> str:
    """Returns Octavo's version, or "source" of a checkout that was not installed."""
    try:
        return version("octavo")
    except PackageNotFoundError:
        return "source"
