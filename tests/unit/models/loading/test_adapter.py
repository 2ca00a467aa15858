"""Adapters equal merged weights, in every family, and bad ones are refused with the reason."""

import pytest
import torch

from models.loading.loader import load_model
from tests.support.adapters import (
    FLOAT32,
    linear_modules,
    load_with_adapters,
    random_factors,
    write_adapter,
    write_merged,
)
from tests.support.paged_runner import PagedRunner
from tests.support.random_checkpoints import EVERY_VARIANT, write_checkpoint

UNSUPPORTED = ("kv_b_proj", "lm_head", ".gate", "router.proj", "shared_expert_gate")
PROMPTS = ([5, 9, 33, 7, 81, 2, 14], [5, 9, 33, 7, 60], [5, 9, 33, 7, 81, 2])


@pytest.mark.parametrize("variant", EVERY_VARIANT)
def test_adapters_equal_merged_weights(tmp_path, variant):
    theirs = write_checkpoint(tmp_path / "base", variant)
    modules = {
        name: shape
        for name, shape in linear_modules(theirs, without=UNSUPPORTED).items()
        if ".experts." not in name
    }
    first = random_factors(modules, seed=1)
    second = random_factors(dict(list(modules.items())[::2]), seed=2)
    folders = [write_adapter(tmp_path / "first", first), write_adapter(tmp_path / "second", second)]
    runner = PagedRunner(load_with_adapters(tmp_path / "base", *folders))
    sequences = [runner.add(prompt, slot) for prompt, slot in zip(PROMPTS, (1, 0, 2), strict=True)]
    mixed = [
        torch.cat(each)
        for each in zip(
            runner.step([(s, 3) for s in sequences]),
            runner.step([(s, len(s.token_ids) - 3) for s in sequences]),
            strict=True,
        )
    ]
    for prompt, logits, factors in zip(PROMPTS, mixed, (first, {}, second), strict=True):
        name = f"merged{prompt[-1]}"
        merged = load_model(write_merged(tmp_path / name, theirs, factors), **FLOAT32)
        alone = PagedRunner(merged)
        expected = alone.run(alone.add(prompt), 3)
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
