"""The error of a pass that finds nothing to fuse."""


class UnmatchedPassError(ValueError):
    """A pass matched nothing in a model that promises a match."""
