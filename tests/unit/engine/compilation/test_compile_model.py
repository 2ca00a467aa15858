import sys

import pytest
import torch
from pydantic import ValidationError
from structlog.testing import capture_logs
from torch import nn

from models.forward_context import Context, ForwardContext, forward_context
from models.ops.attention.attention_metadata import build_attention_metadata
from services.engine.compilation.trace.backend import ImpureForwardError
from services.engine.config.compilation import CompilationConfig
from tests.support.compiled_models import Toy, compile_at, compile_toy
from tests.support.random_checkpoints import write_checkpoint
from tests.support.step_driver import StepDriver

PROMPTS = [[5, 17, 3], [44, 2, 9, 9, 31, 60, 7, 8, 1, 90], [12]]
NUM_OUTPUT = 9
ATTENTION = "octavo::unified_attention_with_output"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, "qwen3", num_hidden_layers=4)
    return folder


def outputs(folder, **options):
    """Runs prompts through prefill, a chunk, mixed steps and decode; returns tokens and cache."""
    driver = StepDriver(folder, **options)
    first, second, third = (driver.add(prompt) for prompt in PROMPTS)
    driver.step([(first, 3)])
    driver.step([(first, 1), (second, 4), (third, 1)])
    driver.step([(second, 6), (third, 1), (first, 1)])
    driver.decode([first, second, third], NUM_OUTPUT)
    return [each.output for each in (first, second, third)], driver.kv_cache_data


@pytest.fixture(scope="module")
def eager(folder):
    return outputs(folder)


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_every_level_gives_the_tokens_and_the_cache_of_eager(folder, eager, level):
    tokens, cache = outputs(folder, prepare=compile_at(level))
    assert tokens == eager[0]
    for ours, theirs in zip(cache, eager[1], strict=True):
        torch.testing.assert_close(ours.k, theirs.k)
        torch.testing.assert_close(ours.v, theirs.v)


def test_the_cache_that_is_compared_is_not_empty(eager):
    assert all(layer.k.abs().sum() > 0 and layer.v.abs().sum() > 0 for layer in eager[1])


def test_pieces_that_compute_the_same_are_compiled_once(folder):
    stats = []
    StepDriver(folder, prepare=lambda model: stats.append(compile_at(3)(model)))
    assert stats[0].num_pieces == 3  # first, last, and one for all between


def run_prefill(driver, num_tokens):
    """Runs one prompt of any length straight through a driver's model."""
    positions = torch.arange(num_tokens)
    token_request = torch.zeros(num_tokens, dtype=torch.int64)
    metadata = build_attention_metadata(
        query_start_loc=torch.tensor([0, num_tokens], dtype=torch.int32),
        seq_lens=torch.tensor([num_tokens], dtype=torch.int32),
        row_ids=torch.zeros(1, dtype=torch.int32),
        block_table=torch.arange(1, 33, dtype=torch.int32).unsqueeze(0),
        positions=positions,
        token_request=token_request,
        block_size=driver.block_size,
        max_seqlen_q=num_tokens,
        max_seqlen_k=num_tokens,
    )
    context = ForwardContext(
        context=Context(
            positions=positions,
            is_prefill=True,
            batch_size=1,
            num_tokens=num_tokens,
            max_q_len=num_tokens,
        ),
        attn_metadata=metadata,
        kv_cache_data=driver.kv_cache_data,
    )
    ids = torch.arange(num_tokens, dtype=torch.int32) % 90
    with torch.inference_mode(), forward_context(context):
        return driver.model(ids, positions)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_any_number_of_tokens_runs_through_one_trace(folder, level):
    eager, compiled = StepDriver(folder), StepDriver(folder, prepare=compile_at(level))
    run_prefill(compiled, 5)
    with torch.compiler.set_stance("fail_on_recompile"):
        for num_tokens in (1, 2, 3, 7, 16, 33, 64):
            torch.testing.assert_close(
                run_prefill(compiled, num_tokens), run_prefill(eager, num_tokens)
            )


def test_a_size_of_its_own_is_compiled_ahead_and_used_for_that_size_only(folder):
    stats = []
    sizes = (7, "cudagraph_capture_sizes", 1000)
    prepare = compile_at(3, compile_sizes=sizes, cudagraph_capture_sizes=(2, 500))
    driver = StepDriver(folder, prepare=lambda model: stats.append(prepare(model)))
    assert stats[0].num_pieces == 3 * 3  # any, 2 and 7 tokens; the rest is out of reach
    eager = StepDriver(folder)
    for num_tokens in (1, 2, 7, 8):
        torch.testing.assert_close(run_prefill(driver, num_tokens), run_prefill(eager, num_tokens))


def test_each_piece_is_wrapped_once_and_knows_its_position(folder, eager):
    infos, calls = [], []

    def wrap(piece, info):
        infos.append(info)

        def run(*args):
            calls.append(info.index)
            return piece(*args)

        return run

    tokens, _ = outputs(folder, prepare=compile_at(3, piece_wrapper=wrap))
    assert tokens == eager[0]
    assert [info.index for info in infos] == [0, 1, 2, 3, 4]
    assert [info.is_first for info in infos] == [True, False, False, False, False]
    assert [info.is_last for info in infos] == [False, False, False, False, True]
    assert calls[:5] == [0, 1, 2, 3, 4]


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="depyf 0.20 knows no code of Python 3.14")
def test_a_dump_holds_the_trace_and_every_piece(folder, tmp_path):
    StepDriver(folder, prepare=compile_at(3, debug_dump_path=tmp_path))
    files = {path.name for path in (tmp_path / "rank_0").iterdir()}
    assert {"traced_graph.py", "split_graph.py", "submod_0.py", "submod_8.py"} <= files
    assert "unified_attention" in (tmp_path / "rank_0" / "traced_graph.py").read_text()
    transformed = (tmp_path / "rank_0" / "transformed_code.py").read_text()
    assert ".forward, " in transformed
    assert "__compiled_fn" in transformed
    compile(transformed, "transformed_code.py", "exec")
    assert "__compiled_fn" in (tmp_path / "rank_0" / "transformed_bytecode.txt").read_text()


def test_a_dump_without_a_decompiler_has_the_instructions(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "depyf", None)
    StepDriver(folder, prepare=compile_at(3, debug_dump_path=tmp_path))
    assert (
        "octavo[debug] is not installed"
        in (tmp_path / "rank_0" / "transformed_code.py").read_text()
    )
    assert "__compiled_fn" in (tmp_path / "rank_0" / "transformed_bytecode.txt").read_text()


def test_a_dump_that_cannot_be_written_costs_its_files_alone(folder, tmp_path, eager):
    taken = tmp_path / "file"
    taken.touch()
    with capture_logs() as logs:
        tokens, _ = outputs(folder, prepare=compile_at(3, debug_dump_path=taken))
    assert tokens == eager[0]
    unwritten = {line["name"] for line in logs if line["event"] == "debug_dump_not_written"}
    assert {"traced_graph.py", "transformed_code.py", "submod_0.py"} <= unwritten


def test_a_splitting_operator_that_the_model_lacks_is_an_error(folder):
    with pytest.raises(ValueError, match="octavo::nothing does not occur"):
        StepDriver(folder, prepare=compile_at(3, splitting_ops=(ATTENTION, "octavo::nothing")))


@pytest.mark.parametrize("level", [-1, 4])
def test_a_level_outside_the_four_is_refused(level):
    with pytest.raises(ValidationError, match="compilation_level\n  Input should be "):
        CompilationConfig(compilation_level=level)


def test_a_model_that_declares_nothing_is_refused_above_level_0():
    model = nn.Linear(4, 4)
    compile_toy(model, 0)
    for level in (1, 2, 3):
        with pytest.raises(ValueError, match="does not declare @support_torch_compile"):
            compile_toy(model, level)


class TestImpureForward:
    """Assignments in forward would be lost: they are refused, not dropped."""

    def add_in_place(self, x):
        self.counter.add_(1)
        return x + self.counter

    def assign_buffer(self, x):
        self.counter = self.counter + 1
        return x + self.counter

    def assign_attribute(self, x):
        self.last_width = x.shape[1] + 1
        return x * 2

    def write_to_input(self, x):
        return x.mul_(2)

    @pytest.mark.parametrize(
        "body", [add_in_place, assign_buffer, assign_attribute, write_to_input]
    )
    def test_a_change_that_outlives_the_call_is_refused(self, body):
        with pytest.raises(ImpureForwardError, match=r"forward (writes to|has side effects)"):
            compile_toy(Toy(body), 2)

    def test_a_change_of_its_own_tensors_is_not(self):
        model = Toy(lambda _, x: (x + 1).mul_(2))
        compile_toy(model, 2)
        torch.testing.assert_close(model(torch.ones(3, 4)), torch.full((3, 4), 4.0))
