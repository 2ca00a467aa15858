"""Traces and compiles a loaded model, before a worker serves or while it does."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from models.parallel.collectives import without_other_ranks
from protos.engine.v1.worker_pb2 import CompileReport
from services.engine.compilation.graphs.piece_wrapper import PieceGraphs
from services.engine.worker.graphs.turns import Turns
from services.engine.worker.runner.model_runner import ModelRunner
from services.engine.worker.start.graph_setup import install_model, warm_up_first_graphs
from services.engine.worker.start.kernel_building import KernelBuilding
from services.engine.worker.start.loaded_model import LoadedModel
from services.engine.worker.start.model_trace import TraceProcess
from services.engine.worker.start.tower_compilation import TowerCode, compile_tower
from services.engine.worker.start.warm_up import (
    all_steps,
    gates_of,
    later_steps,
    queue_small_steps,
    run_small_steps,
    small_step_of_everything,
)

if TYPE_CHECKING:
    from services.engine.compilation.compile_model import CompiledModel


class ModelCompilation:
    """A model, as it runs now and as it will once `run` is done."""

    def __init__(
        self,
        loaded: LoadedModel,
        pieces: PieceGraphs,
        kernels: KernelBuilding,
        tracer: TraceProcess | None,
    ) -> None:
        """Starts with the loaded model.

        Args:
            loaded: the model.
            pieces: of the steps; it takes the compiled pieces.
            kernels: builds the kernels.
            tracer: begins to trace the model, if nothing has.
        """
        self._model = loaded
        self._kernels = kernels
        self._pieces = pieces
        # Steps run without them while the compiled pieces are wrapped.
        self._compiled_pieces = PieceGraphs(pieces.recorder)
        self._compiled: CompiledModel | None = None
        self._tower_code: TowerCode = []
        self._tracer = tracer
        if tracer is not None:
            if loaded.lacks_trace:
                tracer.begin(loaded.trace)
            else:
                tracer.finish()

    def run(self, turns: Turns | None = None) -> None:
        """Waits for the trace or makes it, builds the model's kernels, and compiles it.

        Any thread may call it; steps run meanwhile.

        turns: lets graphs be captured meanwhile, if any are.
        """
        turns = turns or Turns()
        model = self._model
        if model.device.type == "cuda":
            torch.cuda.set_device(model.device)
        with turns.work():
            if self._tracer is not None:
                with turns.pause():
                    self._tracer.finish()
            traced = model.with_trace()
            _build_other_kernels(traced, self._kernels, is_new=traced is not model, turns=turns)
            self._compiled = traced.compile(model.config.compilation, self._compiled_pieces)
            if traced.model.visual is not None:
                turns.give_way()
                self._tower_code = compile_tower(traced)
        self._model = traced

    def install(
        self, runner: ModelRunner, report: Callable[[CompileReport], None] | None = None
    ) -> None:
        """Makes a runner's later steps run the model, and reports its passes."""
        self._pieces.adopt(self._compiled_pieces)
        self._model.run_in(runner)
        for layers, code in self._tower_code:
            layers.use(code)
        install_model(runner, self._compiled, self._model.config.compilation, self._pieces)
        if report is not None and self.report is not None:
            report(self.report)

    @property
    def changes_model(self) -> bool:
        """Whether steps will run something else once the result of `run` is installed."""
        return self._model.will_change

    @property
    def report(self) -> CompileReport | None:
        """Matches of each compiler pass; None if none has run."""
        if self._compiled is not None:
            return CompileReport(pass_matches=self._compiled.stats.pass_matches)
        traced = self._model.traced
        return None if traced is None else CompileReport(pass_matches=traced.pass_matches)


@without_other_ranks()
def _build_other_kernels(
    loaded: LoadedModel, kernels: KernelBuilding, *, is_new: bool, turns: Turns
) -> None:
    """Builds the kernels of all other steps.

    Args:
        loaded: as later steps run it.
        kernels: builds them.
        is_new: no kernel of this model was looked for, those of first steps among them.
        turns: as for `ModelCompilation.run`.
    """
    limits, model = loaded.limits, loaded.model
    steps = (all_steps if is_new else later_steps)(model.config, limits, gates_of(model))
    if is_new:
        runner = loaded.make_runner(1)
        kernels.build_while_serving(
            [
                lambda: run_small_steps(runner, limits, steps, between=turns.give_way),
                lambda: warm_up_first_graphs(runner, loaded.config.compilation, limits=limits),
            ],
            turns,
        )
    with turns.pause():
        kernels.build_others()
    if loaded.device.type == "cuda":
        # One at a time: a step of a request waits for at most one of them.
        for pending in queue_small_steps(loaded.make_runner(1), limits, steps):
            pending.message()
            turns.give_way()
        loaded.make_runner(1).execute(small_step_of_everything(limits)).message()
