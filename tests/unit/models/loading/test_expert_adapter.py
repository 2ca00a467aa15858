"""Adapters of routed experts equal merged weights, in both of PEFT's forms."""

import pytest
import torch

from models.loading.adapter import AdapterError
from models.loading.loader import load_model
from tests.support.adapters import (
    FLOAT32,
    expert_factors,
    linear_modules,
    load_with_adapters,
    random_factors,
    single_expert_factors,
    write_adapter,
    write_merged,
)
from tests.support.paged_runner import PagedRunner
from tests.support.random_checkpoints import EVERY_VARIANT, VARIANTS, write_checkpoint

PROMPTS = ([5, 9, 33, 7, 81, 2, 14], [5, 9, 33, 7, 60], [5, 9, 33, 7, 81, 2])
_WITH_EXPERTS = (
    "experts", "num_local_experts", "n_routed_experts", "num_experts", "enable_moe_block"
)  # fmt: skip
EVERY_MIXTURE = [
    each
    for each in EVERY_VARIANT
    if any(
        VARIANTS[each if isinstance(each, str) else each.values[0]][2].get(key)
        for key in _WITH_EXPERTS
    )
]


def own_logits(folder, theirs, prompt, factors):
    """Returns the logits of a checkpoint with an adapter merged."""
    alone = PagedRunner(load_model(write_merged(folder, theirs, factors), **FLOAT32))
    return alone.run(alone.add(prompt), 3)


@pytest.mark.parametrize("variant", EVERY_MIXTURE)
def test_adapters_of_stacked_experts_equal_merged_weights(tmp_path, variant):
    theirs = write_checkpoint(tmp_path / "base", variant)
    first = expert_factors(theirs, seed=1, size=0.2)
    second = dict(list(expert_factors(theirs, seed=9, size=0.2).items())[::2])
    assert first
    parameters = sorted({name.rpartition(".")[2] for name in second})
    folders = [
        write_adapter(tmp_path / "first", first),
        write_adapter(tmp_path / "second", second, target_parameters=parameters),
    ]
    runner = PagedRunner(load_with_adapters(tmp_path / "base", *folders, with_experts=True))
    sequences = [runner.add(prompt, slot) for prompt, slot in zip(PROMPTS, (1, 0, 2), strict=True)]
    mixed = [
        torch.cat(each)
        for each in zip(
            runner.step([(s, 3) for s in sequences]),
            runner.step([(s, len(s.token_ids) - 3) for s in sequences]),
            strict=True,
        )
    ]
    for number, factors in enumerate((first, {}, second)):
        expected = own_logits(tmp_path / f"merged{number}", theirs, PROMPTS[number], factors)
        torch.testing.assert_close(mixed[number], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("variant", "num_experts", "names"),
    [
        ("qwen3_moe", 8, ("gate_proj", "up_proj", "down_proj")),
        ("mixtral", 5, ("w1", "w3", "w2")),
        ("deepseek_v3", 8, ("gate_proj", "up_proj", "down_proj")),
    ],
)
def test_adapters_of_single_experts_and_attention_equal_merged_weights(
    tmp_path, variant, num_experts, names
):
    theirs = write_checkpoint(tmp_path / "base", variant)
    attention = {
        name: shape for name, shape in linear_modules(theirs).items() if name.endswith("o_proj")
    }
    stacked = expert_factors(theirs, size=0.2)
    rest = random_factors(attention)
    single = single_expert_factors(stacked, num_experts, names)
    folder = write_adapter(tmp_path / "adapter", single | rest)
    model = load_with_adapters(tmp_path / "base", folder, with_experts=True)
    runner = PagedRunner(model)
    logits = runner.run(runner.add(PROMPTS[0], 1), 3)
    expected = own_logits(tmp_path / "merged", theirs, PROMPTS[0], stacked | rest)
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
    few = {name: each for name, each in single.items() if ".experts.1." not in name}
    assert len(few) < len(single)
    write_adapter(tmp_path / "few", few | rest)
    load_with_adapters(tmp_path / "base", tmp_path / "few", with_experts=True)


def test_factors_of_the_transposed_matrix_and_wider_ranks_are_read(tmp_path):
    """Older releases of PEFT exchange inputs and outputs; newer ones give gate and up 2 * r."""
    theirs = write_checkpoint(tmp_path / "base", "qwen3_moe")
    down = {k: v for k, v in expert_factors(theirs, size=0.2).items() if k.endswith("down_proj")}
    gate_up = {
        k: v
        for k, v in expert_factors(theirs, rank=8, size=0.2).items()
        if k.endswith("gate_up_proj")
    }
    stored = dict(gate_up)
    for name, (a, b) in down.items():
        by_expert_a, by_expert_b = a.view(8, -1, a.shape[1]), b.view(len(b), -1, 8)
        stored[name] = (
            by_expert_b.permute(2, 1, 0).reshape(-1, len(b)),
            by_expert_a.permute(2, 1, 0).reshape(a.shape[1], -1),
        )
    patterns = {
        "rank_pattern": {r".*\.gate_up_proj": 8}, "alpha_pattern": {r".*\.gate_up_proj": 16}
    }  # fmt: skip
    folder = write_adapter(tmp_path / "adapter", stored, **patterns)
    runner = PagedRunner(load_with_adapters(tmp_path / "base", folder, with_experts=True))
    logits = runner.run(runner.add(PROMPTS[0], 1), 3)
    expected = own_logits(tmp_path / "merged", theirs, PROMPTS[0], gate_up | down)
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("layers.0.mlp.experts.9.gate_proj", "and the layer has 8 experts"),
        ("layers.0.mlp.experts.1.other_proj", "which the model does not have"),
        ("layers.7.mlp.experts.1.gate_proj", "and the model has 2 layers"),
        ("layers.0.mlp.experts.1.gate_proj", "its shape is"),
    ],
)
def test_factors_that_do_not_fit_are_refused(tmp_path, name, reason):
    write_checkpoint(tmp_path / "base", "qwen3_moe")
    wrong = {f"model.{name}": (24, 33)}
    folder = write_adapter(tmp_path / "adapter", random_factors(wrong))
    with pytest.raises(AdapterError, match=reason):
        load_with_adapters(tmp_path / "base", folder, with_experts=True)


@pytest.mark.parametrize("shapes", [((32, 0), (32, 32)), ((32, 24), (0, 32))])
def test_stacked_factors_without_elements_are_refused(tmp_path, shapes):
    write_checkpoint(tmp_path / "base", "qwen3_moe")
    factors = {"model.layers.0.mlp.experts.down_proj": tuple(map(torch.zeros, shapes))}
    folder = write_adapter(tmp_path / "adapter", factors)
    with pytest.raises(AdapterError, match="of the model has 24 and 32"):
        load_with_adapters(tmp_path / "base", folder, with_experts=True)


def test_experts_of_a_draft_layer_are_not_those_of_the_first_layer(tmp_path):
    """Checkpoints number draft layers by themselves, under `mtp.`."""
    write_checkpoint(tmp_path / "base", "qwen3_moe")
    factors = random_factors({"mtp.layers.0.mlp.experts.1.gate_proj": (24, 32)})
    folder = write_adapter(tmp_path / "adapter", factors)
    with pytest.raises(AdapterError, match="which the model does not have"):
        load_with_adapters(tmp_path / "base", folder, with_experts=True)


def test_experts_need_room(tmp_path):
    theirs = write_checkpoint(tmp_path / "base", "qwen3_moe")
    folder = write_adapter(tmp_path / "adapter", expert_factors(theirs))
    with pytest.raises(AdapterError, match="needs --lora-experts"):
        load_with_adapters(tmp_path / "base", folder)
