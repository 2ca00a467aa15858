"""The formats of a checkpoint's weights, and which module has which."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from models.config_sections.fields import shown
from models.quantization.expressions import Patterns

MAX_BLOCK = 2**16
"""Most rows or columns of weights that share a scale."""

WeightKind = Literal["fp8", "int4", "int8", "mxfp4", "nvfp4"]
Activations = Literal["model", "fp8", "fp4", "int8"]

ROUNDING = "rounding"
"""Method of a plain checkpoint whose weights the loader rounds."""

FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
"""Projection -> the name under which tools list it with its neighbours."""


class QuantizationError(ValueError):
    """A field is ill-typed or names an unsupported format; the message says which and why."""

    def __init__(self, name: str, value: object, wanted: str) -> None:
        super().__init__(f"quantization_config.{name} is {shown(value)}; it must be {wanted}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightScheme:
    """How a group of modules stores its weights."""

    kind: WeightKind
    block_size: tuple[int, int] | None = None
    """Rows and columns of an FP8 weight that share a scale; None: a row or a whole tensor does."""
    group_size: int | None = None
    """Columns of a row of integers that share a scale; None: the whole row, or the tensor."""
    is_symmetric: bool = True
    """Whether integers have no zero points."""
    has_order: bool = False
    """Whether each column names its group."""
    zero_offset: int = 0
    """Added to stored zero points."""
    is_signed: bool = False
    """Whether integers and zero points of Quark are stored with a sign."""
    is_shuffled: bool = True
    """Whether Quark's words hold columns in the order of AWQ."""
    activations: Activations = "model"
    """The format to which the checkpoint's tool rounds activations; "model": none."""
    targets: tuple[str, ...] = ()
    """Names of modules or their ends, names with `*`, regular expressions after `re:`, or classes.
    Empty: all modules."""

    def describe(self) -> str:
        """Returns the format in words of the field, such as "int4 groups of 128"."""
        if self.kind == "fp8":
            rows, columns = self.block_size or (0, 0)
            return f"fp8 blocks of {rows} x {columns}" if self.block_size else "fp8 rows"
        if self.kind in ("mxfp4", "nvfp4"):
            return self.kind
        groups = f"groups of {self.group_size}" if self.group_size else "rows"
        zeros = "" if self.is_symmetric else ", zero points"
        return f"{self.kind} {groups}{zeros}{', ordered' if self.has_order else ''}"


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """The formats of quantised weights.

    Methods that take a module raise ConfigError if expressions take too long to match.
    """

    method: str
    """The tool's name, or ROUNDING."""
    schemes: tuple[WeightScheme, ...]
    """At least one."""
    ignored: tuple[str, ...] = ()
    """Modules that are not quantised: parts of their names, names with `*`, or regular expressions
    after `re:`."""
    assumes_zero_points: bool = False
    """Whether nothing says in which convention zero points are stored."""

    @classmethod
    def rounding_to_fp8(cls) -> "QuantizationConfig":
        """Returns the configuration of plain weights that become FP8, with a scale per row."""
        return cls(method=ROUNDING, schemes=(WeightScheme(kind="fp8", activations="fp8"),))

    @property
    def kinds(self) -> frozenset[WeightKind]:
        """All kinds of weights."""
        return frozenset(scheme.kind for scheme in self.schemes)

    @property
    def unrounded_activations(self) -> tuple[Activations, ...]:
        """Formats to which the checkpoint's tool rounds activations, and no product here does."""
        made_for = {scheme.activations for scheme in self.schemes}
        return tuple(sorted(made_for - {"model", "fp8"}))

    @cached_property
    def _patterns(self) -> Patterns:
        return Patterns()

    @cached_property
    def _known(self) -> dict[str, WeightScheme | None]:
        return {}

    def ignores(self, module: str) -> bool:
        """Returns whether a module, by its name in the checkpoint, is not quantised."""
        names = _names_of(module)
        match = self._patterns.match_part
        return any(match(pattern, name) for pattern in self.ignored for name in names)

    def scheme_of(self, module: str) -> WeightScheme | None:
        """Returns how a module, by its name in the checkpoint, stores its weight.

        A target that is a module's name wins over its class. None: it is not quantised.
        """
        if module not in self._known:
            self._known[module] = None if self.ignores(module) else self._first_scheme(module)
        return self._known[module]

    def _first_scheme(self, module: str) -> WeightScheme | None:
        names = _names_of(module)
        match = self._patterns.match_end
        for scheme in self.schemes:
            if any(match(target, name) for target in scheme.targets for name in names):
                return scheme
        for scheme in self.schemes:
            if not scheme.targets or "Linear" in scheme.targets:
                return scheme
        return None

    def stored_scheme(self, module: str, *kinds: WeightKind) -> WeightScheme | None:
        """Returns how a module that its tensors show to be of one of these kinds is stored.

        The tensors win over the list of ignored modules. None: the configuration has no such kind.
        """
        scheme = self.scheme_of(module)
        if scheme is not None and scheme.kind in kinds:
            return scheme
        return next((each for each in self.schemes if each.kind in kinds), None)


def _names_of(module: str) -> list[str]:
    """Returns a module's name, and the one it has together with its neighbours."""
    parent, dot, own_name = module.rpartition(".")
    fused = FUSED.get(own_name)
    return [module] if fused is None else [module, f"{parent}{dot}{fused}"]
