"""Dummy requests read a null block that is filled again before each pass, by one tensor alone."""

import numpy as np
import pytest
import torch

from models.cudagraph_mode import CUDAGraphMode
from services.engine.worker.inputs.dummy_steps import dummy_batch
from tests.support.compilation import compilation_config
from tests.support.graph_engine import GraphEngine
from tests.support.random_checkpoints import write_checkpoint

GRAPHS = compilation_config(
    cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY, cudagraph_capture_sizes=(2,)
)


@pytest.mark.parametrize("variant", ["qwen3", "gpt_oss", "gemma4", "mimo_v2"])
def test_no_two_of_the_tensors_that_are_filled_at_once_overlap(tmp_path, variant, monkeypatch):
    write_checkpoint(tmp_path, variant)
    engine = GraphEngine(tmp_path, GRAPHS, block_size=16)
    filled = []
    monkeypatch.setattr(torch, "_foreach_copy_", lambda blocks, _: filled.extend(blocks))
    one = dummy_batch(np.array([0, 1]), np.array([1]), engine.limits.max_num_seqs, is_prefill=False)
    engine.runner.forward.reset_for(one)
    ends = 0
    for start, size in sorted((block.data_ptr(), block.nbytes) for block in filled):
        assert start >= ends
        ends = start + size
    of_null_block = {
        tensor[0].data_ptr() for each in engine.cache for tensor in each.tensors().values()
    }
    assert of_null_block == {block.data_ptr() for block in filled}
