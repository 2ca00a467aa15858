"""The modes in which steps run as captured graphs, and the kinds of graphs."""

import enum


class CUDAGraphMode(enum.Enum):
    """The steps that run as captured graphs.

    NONE, PIECEWISE and FULL are the modes that one forward pass can have. A pair holds one of them
    for steps of decodes only and one for all other steps.
    """

    NONE = 0
    PIECEWISE = 1
    """The pieces between attention layers are graphs; attention runs between them."""
    FULL = 2
    """The whole forward pass is one graph."""
    FULL_DECODE_ONLY = (FULL, NONE)
    FULL_AND_PIECEWISE = (FULL, PIECEWISE)

    def __bool__(self) -> bool:
        """Whether any step runs as a graph."""
        return self is not CUDAGraphMode.NONE

    def __str__(self) -> str:
        return self.name

    def decode_mode(self) -> "CUDAGraphMode":
        """Returns the mode of steps that are decodes only."""
        return CUDAGraphMode(self.value[0]) if self.separate_routine() else self

    def mixed_mode(self) -> "CUDAGraphMode":
        """Returns the mode of steps with prefill chunks."""
        return CUDAGraphMode(self.value[1]) if self.separate_routine() else self

    def separate_routine(self) -> bool:
        """Whether decode steps and other steps run in different modes."""
        return isinstance(self.value, tuple)

    def requires_piecewise_compilation(self) -> bool:
        """Whether some steps run as pieces."""
        return CUDAGraphMode.PIECEWISE in (self.decode_mode(), self.mixed_mode())

    def has_full_cudagraphs(self) -> bool:
        """Whether some steps run as one whole graph."""
        return self.max_cudagraph_mode() is CUDAGraphMode.FULL

    def max_cudagraph_mode(self) -> "CUDAGraphMode":
        """Returns the mode that captures most, of the two that steps may have."""
        return CUDAGraphMode(max(self.value)) if self.separate_routine() else self

    @classmethod
    def valid_runtime_modes(cls) -> frozenset["CUDAGraphMode"]:
        """Returns the modes that one forward pass can have."""
        return frozenset({cls.NONE, cls.PIECEWISE, cls.FULL})

    def is_valid_runtime_mode(self) -> bool:
        """Whether one forward pass can have this mode."""
        return not self.separate_routine()


class GraphKind(enum.IntEnum):
    """The content of a captured graph; the wire's GraphKind.

    Members are integers because the key of a step's graph is hashed in every step: the hash of any
    other enum is a Python function.
    """

    DECODE = 1
    """A whole step in which every request has the same number of query tokens."""
    MIXED = 2
    """A whole forward pass over requests with any number of query tokens."""
    PIECEWISE = 3
    """The pieces of a forward pass between attention layers."""
    DRAFT = 4
    """The verification of a decode step's drafts, and the next drafts. No step orders it."""
    ENCODER = 5
    """The encoder of images, over a number of patches. No step orders it."""

    @property
    def is_ordered(self) -> bool:
        """Whether steps order such graphs; the worker chooses all others."""
        return self not in (GraphKind.DRAFT, GraphKind.ENCODER)

    @property
    def runtime_mode(self) -> CUDAGraphMode:
        """The mode of the forward passes that run such a graph."""
        return CUDAGraphMode.PIECEWISE if self is GraphKind.PIECEWISE else CUDAGraphMode.FULL
