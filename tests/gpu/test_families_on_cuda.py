"""Every family says on a GPU what transformers says on a CPU: kernels, compiled code and graphs."""

import copy
import random

import pytest
import torch

from models.cudagraph_mode import CUDAGraphMode
from models.loading.loader import load_model
from services.engine.config.compilation_level import CompilationLevel
from tests.support.compilation import compilation_config
from tests.support.graph_engine import GraphEngine
from tests.support.paged_runner import PagedRunner
from tests.support.random_checkpoints import VARIANTS, transformers_logits, write_checkpoint
from tests.support.step_driver import greedy_continuation

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
FAMILIES = [
    name
    for name in (
        *("llama", "mistral_window", "internlm3", "qwen3", "qwen3_moe", "mixtral", "gpt_oss"),
        *("glm4_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4"),
        *("hy_v4", "llama4", "mimo_v2", "minimax_m3"),
    )
    if name in VARIANTS  # older releases of transformers do not have all
]
PROMPTS = [[5, 17, 3], [44, 2, 9, 9, 31, 60, 7, 8, 1, 90], [12], [5, 17, 3, 8, 8], [70] * 17]
NUM_OUTPUT = 40
LEVELS = [CompilationLevel.NO_COMPILATION, CompilationLevel.PIECEWISE]
SLACK = 2.0
"""How much further from exact results than transformers ours may be; few elements, much chance."""


def random_tokens(length):
    return random.Random(length).choices(range(97), k=length)


def mixed_logits(model, tokens):
    """Computes three sequences in chunks and single tokens, in the same steps; returns the last."""
    runner = PagedRunner(model, device=DEVICE)
    others, sequence = [runner.add(random_tokens(n)) for n in (30, 9)], runner.add(tokens)
    pieces = [runner.step([(others[0], 29), (sequence, 7), (others[1], 8)])[1]]
    pieces.append(runner.step([(others[0], 1), (sequence, 20), (others[1], 1)])[1])
    pieces.append(runner.run(sequence, 1))
    return torch.cat(pieces).float().cpu()


def graph_engine(folder, level, dtype):
    config = compilation_config(
        level=level,
        cudagraph_mode=CUDAGraphMode.FULL,
        cudagraph_capture_sizes=(2, 4, 8, 64),
    )
    engine = GraphEngine(folder, config, device=str(DEVICE), dtype=dtype, num_blocks=200)
    engine.capture()
    return engine


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_float32_gives_the_logits_of_transformers(tmp_path, variant):
    reference = write_checkpoint(tmp_path, variant)
    tokens = random_tokens(43)
    expected = transformers_logits(reference, tokens)
    actual = mixed_logits(load_model(tmp_path, device=DEVICE, dtype=torch.float32), tokens)
    assert (actual - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_bfloat16_is_as_near_to_float32_as_transformers_is(tmp_path, variant, record_property):
    reference = write_checkpoint(tmp_path, variant)
    tokens = random_tokens(60)
    exact = transformers_logits(reference, tokens)
    rounded = transformers_logits(copy.deepcopy(reference).bfloat16(), tokens)
    actual = mixed_logits(load_model(tmp_path, device=DEVICE, dtype=torch.bfloat16), tokens)
    # Where rounding makes a token choose other experts, its logits are others in any program.
    ours, theirs = (
        ((each - exact).norm(dim=1) / exact.norm(dim=1)).median() for each in (actual, rounded)
    )
    record_property("error", f"{ours:.4f}, transformers {theirs:.4f}")
    assert ours <= SLACK * theirs


@pytest.mark.parametrize("level", LEVELS, ids=int)
@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_in_float32_give_the_tokens_of_transformers(tmp_path, family, level):
    reference = write_checkpoint(tmp_path, family)
    engine = graph_engine(tmp_path, level, torch.float32)
    outputs = engine.run(PROMPTS, NUM_OUTPUT)
    assert engine.faults == []
    assert outputs == [greedy_continuation(reference, each, NUM_OUTPUT) for each in PROMPTS]


@pytest.mark.parametrize("level", LEVELS, ids=int)
@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_in_bfloat16_choose_among_the_best_tokens(tmp_path, family, level, record_property):
    reference = write_checkpoint(tmp_path, family)
    engine = graph_engine(tmp_path, level, torch.bfloat16)
    outputs = engine.run(PROMPTS, NUM_OUTPUT)
    assert engine.faults == []
    rounding = copy.deepcopy(reference).bfloat16()
    missed, allowed, num_best = 0.0, 0.0, 0
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        exact = transformers_logits(reference, prompt + output)
        rounded = transformers_logits(rounding, prompt + output)
        allowed = max(allowed, (rounded - exact).abs().max().item())
        before = exact[len(prompt) - 1 : -1]
        gaps = before.max(-1).values - before.gather(1, torch.tensor(output)[:, None])[:, 0]
        missed, num_best = max(missed, gaps.max().item()), num_best + int((gaps == 0).sum())
    record_property(
        "best", f"{num_best}/{NUM_OUTPUT * len(PROMPTS)}, {missed:.3f} <= {allowed:.3f}"
    )
    # Two logits may be off by as much, one up and one down.
    assert missed <= 2 * SLACK * allowed
