"""The draft passes of data-parallel ranks: equally many, with equally many rows, on every rank."""

import pytest
import torch

from models.forward_context import get_forward_context
from models.loading.loader import load_model
from models.parallel.collectives import without_other_ranks
from models.parallel.group import ParallelGroup
from services.engine.batch import (
    BatchDescriptor,
    SpecDecodeMetadata,
    ordered_mode,
    pack_int32,
    read_int32,
)
from services.engine.compilation.graphs.dispatch_mode import DispatchMode
from services.engine.worker.runner.model_runner import ModelRunner
from services.engine.worker.start.kv_memory import allocate_kv_cache
from tests.support.data_parallel_rig import BLOCK_SIZE, DataParallelRig
from tests.support.draft_checkpoints import write_draft_checkpoint
from tests.support.requests import make_request

NUM_RANKS, NUM_BLOCKS = 3, 33
EXPERTS = torch.ops.octavo.expert_parallel_moe.default
COLLECTIVES = {torch.ops.octavo.gather_rows.default, torch.ops.octavo.reduce_scatter.default}


class SeenPasses(DispatchMode):
    """Notes the collectives of a step with their shapes, and the tokens that reach the experts."""

    def __init__(self):
        super().__init__()
        self.collectives = []
        self.counts = []
        self.sampling = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in COLLECTIVES:
            self.collectives.append((func, tuple(args[0].shape)))
        if func is EXPERTS:
            metadata = get_forward_context().dp_metadata
            self.counts.append(metadata.num_tokens_across_dp.tolist())
            self.sampling.append(metadata.num_sampling_across_dp.tolist())
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module", params=[1, 2])
def model(request, tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("checkpoint")
    write_draft_checkpoint(folder, num_draft_layers=request.param, vocab_size=1000)
    group = ParallelGroup(data_parallel_size=NUM_RANKS)
    return load_model(
        folder,
        device=torch.device("cpu"),
        dtype=torch.float32,
        group=group,
        with_draft_layers=True,
    )


class Runners:
    """The runners of all ranks, each without the others."""

    def __init__(self, model, limits):
        self.each = [self._runner(model, limits) for _ in range(NUM_RANKS)]

    def _runner(self, model, limits):
        cache = allocate_kv_cache(
            model,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        return ModelRunner(model, cache, limits=limits, device=torch.device("cpu"))

    def run(self, step):
        """Runs a step on every rank; returns the results and what each rank's passes did."""
        results, seen = [], []
        for runner, part in zip(self.each, (step, *step.others), strict=True):
            with SeenPasses() as passes, without_other_ranks():
                results.append(runner.execute(part.descriptor).message())
            seen.append(passes)
        return results, seen


@pytest.mark.parametrize("lengths", [(5, 21, 2, 9), (3,)], ids=["all ranks", "one rank"])
def test_every_rank_calls_the_same_collectives(model, lengths):
    rig = DataParallelRig(
        NUM_RANKS, num_blocks=NUM_BLOCKS, num_speculative_tokens=3, min_speculative_tokens=0
    )
    runners = Runners(model, rig.limits)
    requests = [
        make_request([7 + i] * length, max_tokens=2 + 2 * i, logprobs=None)
        for i, length in enumerate(lengths)
    ]
    rig.add(*requests)
    num_single = set()
    while rig.scheduler.has_work:
        step = rig.scheduler.schedule()
        results, seen = runners.run(step)
        first, *others = results
        first.across_dp.extend(others)
        rig.scheduler.update(step, first)
        calls, *other_calls = (each.collectives for each in seen)
        assert all(each == calls for each in other_calls)
        metadata = step.descriptor.dp_metadata
        tokens, sampling = (
            read_int32(each).tolist()
            for each in (metadata.num_tokens_across_dp, metadata.num_sampling_across_dp)
        )
        assert sampling == [len(part.requests) for part in (step, *step.others)]
        for passes in seen:
            assert set(map(tuple, passes.counts)) <= {tuple(tokens), tuple(sampling)}
            assert all(each == sampling for each in passes.sampling)
        num_single.add(max(sampling))
    assert len(num_single) > 1 or len(lengths) == 1


def descriptor(counts, sampling, **metadata):
    order = BatchDescriptor(step_id=1, cudagraph_runtime_mode=ordered_mode(None))
    order.dp_metadata.num_tokens_across_dp = pack_int32(counts)
    order.dp_metadata.num_sampling_across_dp = pack_int32(sampling)
    order.spec_decode_metadata.MergeFrom(SpecDecodeMetadata(num_spec_steps=3, **metadata))
    return order


def test_an_idle_rank_joins_the_passes_of_single_tokens_if_there_are_any(model):
    limits = DataParallelRig(NUM_RANKS, num_speculative_tokens=3).limits
    runner = Runners(model, limits).each[0]
    num_whole = 1 + len(model.model.layers) - model.config.num_hidden_layers
    for sampling, num_next, num_passes in (([0, 2, 1], 3, 3), ([0, 0, 0], 3, 0), ([0, 2, 1], 0, 0)):
        order = descriptor([0, 6, 4], sampling, num_next_drafts=num_next)
        with SeenPasses() as seen, without_other_ranks():
            result = runner.execute(order).message()
        num_single = max(0, num_passes - num_whole + 1)
        assert seen.counts[len(seen.counts) - num_single :] == [sampling] * num_single
        assert not result.token_ids
        assert not result.draft_token_ids


@pytest.mark.parametrize(
    ("sampling", "found"),
    [([1], "of 1 data-parallel ranks"), ([0, 5, 0], "more than 4 sampling requests")],
)
def test_the_sampling_requests_of_other_ranks_are_checked(model, sampling, found):
    limits = DataParallelRig(NUM_RANKS, num_speculative_tokens=3).limits
    with pytest.raises(ValueError, match=found):
        Runners(model, limits).each[0].execute(descriptor([0, 6, 4], sampling))
