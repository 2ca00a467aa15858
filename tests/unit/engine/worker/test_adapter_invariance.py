"""Adapters in batch-invariant mode on a CPU: the same bits, whatever else is in a step."""

import pytest
import torch

from models.batch_invariance import use_batch_invariance
from tests.support.adapter_engine import AdapterCase
from tests.support.invariance import (
    Way,
    assert_same_bits,
    batch_invariance,
    make_prompts,
    run,
    run_alone,
    ways,
)

PROMPTS = make_prompts(9)
WAYS = (
    *("2 requests", "5 requests", "13 requests", "chunks of 17", "prefix hits", "preempted"),
    *("drafts", "level 3", "FULL on level 3"),
)
FEW = ("5 requests", "chunks of 17", "FULL on level 3")


@pytest.fixture(autouse=True)
def _mode():
    torch.set_num_threads(1)
    with batch_invariance():
        yield


class Adapters:
    """A checkpoint with three adapters, and the bits of requests that run alone."""

    def __init__(self, folder, family, **options):
        case = AdapterCase(folder, family, num_adapters=3, with_experts="moe" in family)
        self.base = case.base
        self.folders = [folder / "adapters" / name for name in case.names]
        self.chosen = [[None, *self.folders][number % 4] for number in range(len(PROMPTS))]
        self.options = {"adapters": self.folders, **options}
        self.alone = run_alone(self.base, PROMPTS, self.chosen, **self.options)

    def run(self, way, chosen=None):
        return run(self.base, PROMPTS, way, chosen or self.chosen, **self.options)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    with batch_invariance():
        return Adapters(tmp_path_factory.mktemp("adapters"), "qwen3")


@pytest.mark.parametrize("way", WAYS)
def test_requests_with_adapters_have_the_same_bits_in_every_way(adapters, way):
    chosen = Way(options={"num_blocks": 17}) if way == "preempted" else ways()[way]
    outcome = adapters.run(chosen)
    assert_same_bits(adapters.alone, outcome)
    if way == "preempted":
        assert outcome.engine.scheduler.counts.num_preemptions


def test_steps_without_adapters_have_the_bits_of_those_with_some(adapters):
    none = [None] * len(PROMPTS)
    outcome = adapters.run(Way(), none)
    for number, chosen in enumerate(adapters.chosen):
        assert (outcome.tokens[number] == adapters.alone.tokens[number]) == (chosen is None)
    without = run_alone(adapters.base, PROMPTS, none)
    assert_same_bits(without, outcome)


FAMILIES = {
    "qwen3_moe": ("qwen3_moe", {}),
    "bfloat16": ("qwen3_moe", {"dtype": torch.bfloat16}),
    "gemma3": ("gemma3", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "qwen3_5": ("qwen3_5", {"num_states": 24}),
}


@pytest.fixture(scope="module", params=FAMILIES)
def of_family(request, tmp_path_factory):
    family, options = FAMILIES[request.param]
    with batch_invariance():
        return Adapters(tmp_path_factory.mktemp("family"), family, **options)


@pytest.mark.parametrize("way", FEW)
def test_families_have_the_same_bits(of_family, way):
    assert_same_bits(of_family.alone, of_family.run(ways()[way]))


def test_without_the_mode_bits_depend_on_the_others(adapters):
    """The tests above would notice."""
    use_batch_invariance(is_on=False)
    whole, cut = (adapters.run(Way(options={"max_num_batched_tokens": size})) for size in (200, 17))
    assert whole.hashes != cut.hashes
