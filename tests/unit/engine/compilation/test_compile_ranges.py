"""Each range of numbers of tokens has compiled pieces of its own."""

import copy

import pytest
import torch
from torch import SymInt, Tensor

from services.engine.compilation.cache.artifact_cache import ArtifactCache
from services.engine.compilation.cache.cache_key import Factors
from services.engine.compilation.cache.program_store import load_program, store_program
from services.engine.compilation.pieces.compiler_manager import CompilerManager
from services.engine.compilation.pieces.linking import link
from services.engine.compilation.pieces.piece_compiler import PieceCompiler
from services.engine.compilation.program.compile_range import CompileRange, compile_ranges
from services.engine.compilation.trace.tracing import trace_programs
from tests.support.compilation import compilation_config
from tests.support.compiled_models import CountingCompiler, compile_at
from tests.support.paged_runner import PagedRunner
from tests.support.plain_model import PlainModel

MAX_TOKENS = 64
ENDS = (2, 9)
PROMPT = [5, 17, 3, 44, 2, 9, 9, 31, 7, 8, 1]
EXAMPLES = [torch.zeros(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int64)]
FACTORS = Factors({"torch.version": "1"})


class TunedCompiler(CountingCompiler):
    """Notes the number of tokens that each piece is tuned for, or made for."""

    def __init__(self):
        super().__init__()
        self.tuned_for = []
        self.made_for = []

    def compile(self, graph, example_inputs, compiler_config, runtime_shape=None):
        sizes = [
            size
            for value in example_inputs
            for size in (value.shape if isinstance(value, Tensor) else (value,))
            if isinstance(size, SymInt)
        ]
        if runtime_shape is None:
            (hint,) = {
                size.node.shape_env.var_to_hint_override[symbol]
                for size in sizes
                for symbol in size.node.expr.free_symbols
            }
            self.tuned_for.append(hint)
        else:
            self.made_for.append(runtime_shape)
        return super().compile(graph, example_inputs, compiler_config, runtime_shape)


@pytest.mark.parametrize(
    ("compile_range", "typical"),
    [
        (CompileRange(), 256),
        (CompileRange(end=64), 64),
        (CompileRange(start=65, end=512), 256),
        (CompileRange(start=513, end=16384), 513),
    ],
)
def test_code_is_tuned_for_a_number_of_tokens_in_its_range(compile_range, typical):
    assert compile_range.typical == typical


def traced_plain_model():
    """Returns a model without our operators but attention, and its trace for the ranges."""
    model = PlainModel()
    config = compilation_config(level=3, passes=[], compile_ranges=list(ENDS))
    return model, trace_programs(model, config, example_inputs=EXAMPLES, max_num_tokens=MAX_TOKENS)


def run(model, forward):
    model = copy.copy(model)
    model.forward = forward
    runner = PagedRunner(model)
    sequence = runner.add(PROMPT)
    # Steps of all ranges, and of their last numbers of tokens.
    return torch.cat([runner.step([(sequence, count)])[0] for count in (1, 2, 3)] +
                     [runner.run(sequence, 5)])  # fmt: skip


def test_each_range_has_artifacts_of_its_own_and_runs_them(tmp_path):
    model, traced = traced_plain_model()
    cache, ranges = ArtifactCache.open(tmp_path, FACTORS), compile_ranges(ENDS, MAX_TOKENS)
    compiler = TunedCompiler()
    manager = CompilerManager(compiler, {}, cache=cache, factors=FACTORS)
    forward = link(traced, PieceCompiler(manager))
    # Three kinds of pieces, in each of three ranges.
    assert sorted(compiler.tuned_for) == [2] * 3 + [9] * 3 + [64] * 3
    assert cache.num_artifacts == manager.stats.num_pieces == 9
    expected = run(model, model.forward)
    torch.testing.assert_close(run(model, forward), expected)

    # A later start finds each range's, of the kept program too.
    store_program(cache, "model", traced, model)
    kept = load_program(cache, "model", model=model, layers=(), ranges=ranges)
    for program in (traced_plain_model()[1], kept):
        later = TunedCompiler()
        manager = CompilerManager(later, {}, cache=cache, factors=FACTORS)
        forward = link(program, PieceCompiler(manager))
        assert (later.num_compiled, manager.stats.num_loaded) == (0, 9)
        torch.testing.assert_close(run(model, forward), expected)


def test_a_size_of_its_own_is_compiled_for_its_range_alone():
    _, traced = traced_plain_model()
    compiler = TunedCompiler()
    manager = CompilerManager(compiler, {})
    link(traced, PieceCompiler(manager, compile_sizes=[1, 9, 10]))
    assert sorted(compiler.made_for) == [1] * 3 + [9] * 3 + [10] * 3
    assert manager.stats.num_pieces == 18


def test_a_dump_holds_the_graphs_of_each_range(tmp_path):
    compile_at(3, compile_ranges=list(ENDS), debug_dump_path=tmp_path)(PlainModel())
    folder = tmp_path / "rank_0"
    names = {"pass_1_canonical.py", "split_graph.py", "submod_0.py"}
    for each in (folder, folder / "from_3_tokens", folder / "from_10_tokens"):
        assert names <= {path.name for path in each.iterdir()}
    assert (folder / "traced_graph.py").exists()
