"""The steps of one data-parallel rank: padded to the others, idle without requests of its own."""

import pytest
import torch

from models.forward_context import get_forward_context
from models.parallel.collectives import without_other_ranks
from services.engine.batch import BatchDescriptor, ordered_mode, pack_int32, read_int32
from services.engine.compilation.graphs.dispatch_mode import DispatchMode
from tests.support.random_checkpoints import write_checkpoint
from tests.support.step_driver import StepDriver

EXPERTS = torch.ops.octavo.expert_parallel_moe.default
NUM_RANKS, TOP_K = 2, 3


class SeenExperts(DispatchMode):
    """Notes the rows that reach the experts, and the tokens of each rank in the context."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is EXPERTS:
            counts = get_forward_context().dp_metadata.num_tokens_across_dp
            self.steps.append((len(args[0]), counts.tolist()))
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, "qwen3_moe", num_hidden_layers=1)
    return folder


@pytest.fixture
def driver(folder):
    return StepDriver(folder, data_parallel_size=NUM_RANKS)


def run(driver, descriptor):
    """Runs a step without the other rank; returns its result, and what reached the experts."""
    with SeenExperts() as seen, without_other_ranks():
        result = driver.runner.execute(descriptor).message()
    ((num_rows, counts),) = seen.steps
    return result, num_rows, counts


def ordered(driver, counts):
    """A step of one request with the first number of tokens."""
    descriptor = driver.descriptor([(driver.add(range(counts[0])), counts[0])])
    descriptor.dp_metadata.num_tokens_across_dp = pack_int32(counts)
    return descriptor


def idle(counts):
    descriptor = BatchDescriptor(step_id=1, cudagraph_runtime_mode=ordered_mode(None))
    descriptor.dp_metadata.num_tokens_across_dp = pack_int32(counts)
    return descriptor


def loads(driver):
    (experts,) = (each.experts for each in driver.model.modules() if hasattr(each, "experts"))
    return experts.expert_load


@pytest.mark.parametrize("counts", [[3, 7], [7, 3], [1, 1]])
def test_a_step_has_as_many_rows_as_the_largest_of_all_ranks(driver, counts):
    result, num_rows, seen = run(driver, ordered(driver, counts))
    assert num_rows == NUM_RANKS * max(counts)
    assert seen == counts
    assert len(read_int32(result.token_ids)) == 1
    # Padding chooses no expert.
    assert loads(driver).sum() == TOP_K * sum(counts)


def test_padding_changes_no_token(driver):
    alone = run(driver, ordered(driver, [5, 5]))[0]
    padded = run(driver, ordered(driver, [5, 9]))[0]
    assert read_int32(alone.token_ids).tolist() == read_int32(padded.token_ids).tolist()


def test_a_rank_without_requests_computes_a_dummy_that_chooses_no_expert(driver):
    result, num_rows, seen = run(driver, idle([0, 4]))
    assert num_rows == NUM_RANKS * 4
    assert seen == [0, 4]
    assert not result.token_ids
    assert loads(driver).sum() == TOP_K * 4  # the other rank's rows stand for their own here


def test_a_step_of_this_rank_alone_counts_every_row(driver):
    descriptor = ordered(driver, [3, 7])
    descriptor.ClearField("dp_metadata")
    _, num_rows, seen = run(driver, descriptor)
    assert num_rows == NUM_RANKS * 3
    assert min(seen) >= 3


@pytest.mark.parametrize(
    ("counts", "found"),
    [
        ([3], "the tokens of 1 data-parallel ranks"),
        ([3, 1, 1], "the tokens of 3"),
        ([3, 65], "more than 64 tokens"),
        ([3, -1], "more than 64 tokens"),
    ],
)
def test_tokens_of_other_ranks_are_checked(driver, counts, found):
    with pytest.raises(ValueError, match=found):
        driver.runner.execute(ordered(driver, counts))


def test_an_engine_of_one_rank_refuses_the_tokens_of_others(folder):
    driver = StepDriver(folder)
    with pytest.raises(ValueError, match="the tokens of 2 data-parallel ranks"):
        driver.runner.execute(ordered(driver, [3, 3]))
