"""Where each flag of compilation and graphs has an effect."""

from dataclasses import dataclass

from services.engine.config.compilation_level import CompilationLevel

ALL_LEVELS = tuple(CompilationLevel)
COMPILED = (CompilationLevel.DYNAMO_ONCE, CompilationLevel.PIECEWISE)
TRACED_ONCE_OR_NEVER = (CompilationLevel.NO_COMPILATION, *COMPILED)
PIECES = (CompilationLevel.PIECEWISE,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Where a flag has an effect.

    levels: compilation levels. needs_inductor: only with --use-inductor. needs_graphs: only where
        graphs are captured. is_refused: a value where it has none is an error, not a warning.
    """

    levels: tuple[CompilationLevel, ...] = ALL_LEVELS
    needs_inductor: bool = False
    needs_graphs: bool = False
    is_refused: bool = False

    def __str__(self) -> str:
        """Names the conditions, as they follow "works"; empty if there are none."""
        conditions = []
        if self.levels != ALL_LEVELS:
            *rest, last = (str(int(level)) for level in self.levels)
            conditions.append(
                f"on levels {', '.join(rest)} and {last}" if rest else f"on level {last}"
            )
        if self.needs_inductor:
            conditions.append("with Inductor")
        if self.needs_graphs:
            conditions.append("where graphs are captured")
        return " ".join(conditions)

    def holds(self, level: int, *, use_inductor: bool, has_graphs: bool = True) -> bool:
        """Whether the flag has an effect."""
        return (
            level in self.levels
            and (use_inductor or not self.needs_inductor)
            and (has_graphs or not self.needs_graphs)
        )


GRAPHS = Reach(needs_graphs=True)
_EVERYWHERE = Reach()

FLAG_REACH = {
    "enforce_eager": _EVERYWHERE,
    "compilation_level": _EVERYWHERE,
    "cudagraph_mode": _EVERYWHERE,
    "cudagraph_capture_sizes": GRAPHS,
    "cudagraph_piece_sizes": GRAPHS,
    "cudagraph_encoder_sizes": Reach(needs_graphs=True),
    "cuda_graph_sizes": GRAPHS,
    "cudagraph_padding": Reach(needs_graphs=True),
    "cudagraph_copy_inputs": Reach(needs_graphs=True),
    "capture_while_serving": _EVERYWHERE,
    "fail_on_late_build": _EVERYWHERE,
    "splitting_ops": Reach(levels=TRACED_ONCE_OR_NEVER),
    "use_inductor": Reach(levels=COMPILED),
    "passes": Reach(levels=COMPILED),
    "disable_pass": Reach(levels=COMPILED),
    "max_num_streams": Reach(levels=COMPILED),
    "allow_unmatched_passes": Reach(levels=COMPILED),
    "compile_sizes": Reach(levels=PIECES, is_refused=True),
    "compile_ranges": Reach(levels=COMPILED, is_refused=True),
    "inductor_compile_config": Reach(levels=COMPILED, needs_inductor=True, is_refused=True),
    "debug_dump_path": Reach(levels=COMPILED, is_refused=True),
    "compile_cache_dir": _EVERYWHERE,
    "histogram_dir": _EVERYWHERE,
}
"""Flag of CompilationConfig -> where it has an effect."""
