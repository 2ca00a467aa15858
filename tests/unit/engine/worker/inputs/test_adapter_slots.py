"""Slots of a step's adapters, as its layers read them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from services.engine.batch import RowAssignment
from services.engine.compilation.graphs.capture_plan import full_decode_key
from services.engine.worker.inputs.adapter_slots import AdapterSlots
from services.engine.worker.inputs.batch import Batch

KEY = full_decode_key(4, 1)
PLAIN = replace(KEY, skips_adapters=True)


def decodes(*rows, num_tokens_across_dp=None):
    count = len(rows)
    return Batch(
        query_start_loc=np.arange(count + 1, dtype=np.int32),
        seq_lens=np.full(count, 3, np.int32),
        row_ids=np.array(rows, np.int32),
        sample_indices=np.arange(count, dtype=np.int32),
        num_tokens=count,
        max_seqlen_q=1,
        max_seqlen_k=3,
        is_prefill=False,
        num_tokens_across_dp=num_tokens_across_dp,
    )


@pytest.fixture
def slots():
    slots = AdapterSlots(5, 8, torch.device("cpu"))
    slots.assign([RowAssignment(row=1, adapter_slot=2), RowAssignment(row=3, adapter_slot=1)])
    return slots


@pytest.mark.parametrize("counts", [None, np.array([2, 1], np.int32)])
def test_a_step_whose_graph_adds_none_reads_no_slots_of_steps_before(slots, counts):
    slots.write(decodes(0, 1, 3, num_tokens_across_dp=counts), KEY)
    assert slots.of_step(KEY) is slots.of_step() is slots.memory
    assert slots.memory.tolist() == [0, 2, 1, 0, 0, 0, 0, 0]
    slots.write(decodes(0, 2, num_tokens_across_dp=counts), PLAIN)
    assert slots.of_step(PLAIN) is None
    assert slots.of_step() is None
    assert not slots.memory.any(), "drafts read it"


def test_ranks_without_adapters_have_slots_for_those_of_others(slots):
    slots.write(decodes(1), None)
    slots.write(decodes(0, num_tokens_across_dp=np.array([1, 2], np.int32)), None)
    assert slots.of_step() is slots.memory
    assert not slots.memory[:2].any()
    slots.write(decodes(0), None)
    assert slots.of_step() is None
