"""Batch-invariant mode on a CPU: the same bits of logits, whatever else is in a step."""

import pytest
import torch

from models.batch_invariance import row_wise, use_batch_invariance
from tests.support.invariance import (
    FORMATS,
    Way,
    assert_same_bits,
    batch_invariance,
    make_prompts,
    run,
    run_alone,
    ways,
)
from tests.support.random_checkpoints import write_checkpoint

PROMPTS = make_prompts(16)
FEW = ("5 requests", "chunks of 17", "prefix hits", "level 3", "FULL on level 3")
FAMILIES = (
    *("deepseek_v2_groups", "deepseek_v3", "gemma2", "glm4_moe", "gpt_oss", "granite", "llama4"),
    *("mimo_v2", "minimax_m3", "mixtral", "olmo2", "phi3", "qwen3_moe"),
    *(
        pytest.param(name, marks=pytest.mark.families)
        for name in ("deepseek_v32", "glm_moe_dsa_shared", "minimax_m3_odd")
    ),
)


@pytest.fixture(autouse=True)
def _mode():
    torch.set_num_threads(1)
    with batch_invariance():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, "qwen3")
    return folder


@pytest.fixture(scope="module")
def alone(folder):
    with batch_invariance():
        return {name: run_alone(folder, PROMPTS, **options) for name, options in FORMATS.items()}


@pytest.mark.parametrize("way", ways())
def test_logits_have_the_same_bits_in_every_way(folder, alone, way):
    outcome = run(folder, PROMPTS, ways()[way])
    assert_same_bits(alone["float32"], outcome)
    if way == "preempted":
        assert outcome.engine.scheduler.counts.num_preemptions
    if way == "prefix hits":
        assert outcome.engine.scheduler.counts.cached_tokens


@pytest.mark.parametrize("way", FEW)
@pytest.mark.parametrize("kind", ["bfloat16", "8-bit cache"])
def test_other_dtypes_have_the_same_bits(folder, alone, kind, way):
    assert_same_bits(alone[kind], run(folder, PROMPTS, ways()[way], **FORMATS[kind]))


@pytest.mark.parametrize("variant", FAMILIES)
def test_families_have_the_same_bits(tmp_path, variant):
    write_checkpoint(tmp_path, variant)
    prompts = PROMPTS[:6]
    alone = run_alone(tmp_path, prompts)
    for way in FEW:
        assert_same_bits(alone, run(tmp_path, prompts, ways()[way]))


def test_without_the_mode_bits_depend_on_the_chunks(folder, alone):
    """The tests above would notice."""
    use_batch_invariance(is_on=False)
    whole, cut = (
        run(folder, PROMPTS, Way(options={"max_num_batched_tokens": size})) for size in (200, 17)
    )
    assert whole.hashes != cut.hashes


def test_each_row_is_computed_with_the_shape_of_one():
    shapes = []

    def double(x):
        shapes.append(x.shape)
        return 2 * x

    x = torch.arange(6.0).view(3, 2)
    assert torch.equal(row_wise(double, x), 2 * x)
    assert shapes == [(1, 2)] * 3
    assert row_wise(double, x[:0]).shape == (0, 2)
