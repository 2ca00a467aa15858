"""The error of a pass that should have matched; it needs no compiler to be caught."""


class UnmatchedPassError(ValueError):
    """A pass matched nothing in a model that promises a match."""
