"""How much of a model is compiled."""

import enum


class CompilationLevel(enum.IntEnum):
    """How much of a model is compiled, as --compilation-level says it."""

    NO_COMPILATION = 0
    """The model runs as it is written."""
    DYNAMO_AS_IS = 1
    """Traced in one graph and run as traced: shows whether a model can be traced."""
    DYNAMO_ONCE = 2
    """Traced once and compiled as a whole; no guard is evaluated while serving."""
    PIECEWISE = 3
    """Traced once, split at attention, and each distinct piece compiled once."""
