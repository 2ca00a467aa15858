"""A layer of experts whose ranks have different tokens gives what one rank gives, in float32."""

import torch

from tests.support.gloo_ranks import run_ranks
from tests.support.random_checkpoints import write_checkpoint

COUNTS = [4, 0, 6]
"""Tokens of each rank; all compute as many rows as the last."""

PROGRAM = """
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

from models.config import ModelConfig
from models.forward_context import DPMetadata, ForwardContext, forward_context
from models.layers.moe import FusedMoE
from models.parallel.group import ParallelGroup

config = ModelConfig.from_folder(Path({folder!r}))
counts = {counts}
rows = torch.randn(len(counts), max(counts), config.hidden_size,
                   generator=torch.Generator().manual_seed(1))

def filled(group):
    layer = FusedMoE(config, group)
    for number, (name, param) in enumerate(layer.named_parameters()):
        of_experts = name.startswith("experts.")
        shape = (config.moe.num_experts, *param.shape[1:]) if of_experts else param.shape
        values = torch.randn(shape, generator=torch.Generator().manual_seed(number)) / 8
        if of_experts:
            layer.experts.weight_loader(param, values, (None, 0))
        else:
            param.copy_(values)
    return layer

layer = filled(ParallelGroup(data_parallel_rank=rank, data_parallel_size=size,
                             num_redundant_experts=2))
metadata = DPMetadata(num_tokens_across_dp=torch.tensor(counts, dtype=torch.int32))
context = ForwardContext(context=None, attn_metadata=None, kv_cache_data=[], dp_metadata=metadata)
with forward_context(context):
    results = [layer(rows[rank])[: counts[rank]], layer.experts.expert_load]
results.append(filled(ParallelGroup())(rows[rank])[: counts[rank]])
"""


def test_ranks_give_the_rows_of_one(tmp_path):
    write_checkpoint(tmp_path / "model", "deepseek_v3")
    program = PROGRAM.format(folder=str(tmp_path / "model"), counts=COUNTS)
    for own, loads, expected in run_ranks(program, len(COUNTS), tmp_path):
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-5)
        assert loads.sum() == 3 * sum(COUNTS)  # every rank counts the choices of all
