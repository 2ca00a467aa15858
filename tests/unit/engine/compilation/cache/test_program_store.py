"""A traced program that was kept on disk runs like the one that was traced."""

import pytest
import torch

from models.loading.loader import load_model
from services.engine.compilation.cache.artifact_cache import ArtifactCache
from services.engine.compilation.cache.cache_key import Factors
from services.engine.compilation.cache.program_store import load_program, store_program
from services.engine.compilation.pieces.linked_program import RangedForward
from services.engine.compilation.pieces.linking import run_as_traced
from services.engine.compilation.program.compile_range import CompileRange, compile_ranges
from services.engine.compilation.trace.tracing import trace_programs
from tests.support.compilation import compilation_config
from tests.support.random_checkpoints import write_checkpoint
from tests.support.step_driver import StepDriver

EXAMPLES = [torch.zeros(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int64)]
MAX_TOKENS = 64
PROMPTS = [[5, 17, 3], [44, 2, 9, 9, 31, 60, 7, 8, 1, 90]]


def traced(model, **settings):
    config = compilation_config(level=3, use_inductor=False, **settings)
    return trace_programs(model, config, example_inputs=EXAMPLES, max_num_tokens=MAX_TOKENS)


def tokens(folder, forward_of):
    driver = StepDriver(folder)
    driver.model.forward = forward_of(driver.model)
    sequences = [driver.add(prompt) for prompt in PROMPTS]
    driver.decode(sequences, 6)
    return [each.output for each in sequences]


@pytest.mark.parametrize("variant", ["qwen3", "deepseek_v3"])
def test_a_kept_program_gives_the_tokens_of_eager(tmp_path, variant):
    folder = tmp_path / "model"
    write_checkpoint(folder, variant, num_hidden_layers=5)
    cache = ArtifactCache.open(tmp_path / "cache", Factors({"torch.version": "1"}))
    first = load_model(folder, device=torch.device("cpu"), dtype=torch.float32)
    store_program(cache, "model", traced(first), first)

    def kept(model):
        program = load_program(
            cache,
            "model",
            model=model,
            layers=model.decoder_layers,
            ranges=compile_ranges((), MAX_TOKENS),
        )
        assert program.trace is None
        assert program.pass_matches["linear_residual"] > 0
        return run_as_traced(program)

    assert tokens(folder, kept) == tokens(folder, lambda model: model.forward)


def test_a_program_of_other_ranges_or_a_damaged_one_is_traced_again(tmp_path):
    folder = tmp_path / "model"
    write_checkpoint(folder, "qwen3", num_hidden_layers=2)
    cache = ArtifactCache.open(tmp_path / "cache", Factors({"torch.version": "1"}))
    model = load_model(folder, device=torch.device("cpu"), dtype=torch.float32)
    store_program(cache, "model", traced(model), model)

    def load(ends):
        ranges = compile_ranges(ends, MAX_TOKENS)
        return load_program(cache, "model", model=model, layers=(), ranges=ranges)

    assert load(()) is not None
    assert load((8,)) is None
    (path,) = cache.folder.glob("*.program")
    path.write_bytes(path.read_bytes()[:-1])
    assert load(()) is None


def test_each_range_of_tokens_has_its_own_program(tmp_path):
    write_checkpoint(tmp_path, "qwen3", num_hidden_layers=2)
    model = load_model(tmp_path, device=torch.device("cpu"), dtype=torch.float32)
    programs = traced(model, compile_ranges=[2, 8, 999])
    assert [each for each, _ in programs.programs] == [
        CompileRange(start=1, end=2),
        CompileRange(start=3, end=8),
        CompileRange(start=9, end=MAX_TOKENS),
    ]
    forward = run_as_traced(programs)
    assert isinstance(forward, RangedForward)
    of_ranges = tokens(tmp_path, lambda model: run_as_traced(traced(model, compile_ranges=[2, 8])))
    assert of_ranges == tokens(tmp_path, lambda model: model.forward)
