"""The GPU's time of a captured decode step: the model, its logits and the greedy choice.

    python -m tests.bench.decode_step MODEL_FOLDER [--batch-sizes 1 8 32] [--context 256]

Random weights, bf16, no scheduler and nothing on the host: only the kernels remain.
"""

import argparse
import statistics
from itertools import pairwise
from pathlib import Path

import torch

from models.forward_context import Context, ForwardContext, forward_context
from models.kv_cache import KVCacheData
from models.loading.loader import load_model
from models.ops.attention.attention_metadata import (
    build_attention_metadata,
    make_attention_workspace,
)
from models.ops.sampling.step_tokens import choose_greedily
from tests.support.attention_case import scattered_blocks

BLOCK_SIZE = 16
REPLAYS = 30
BATCH_SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256]


class DecodeStep:
    """One step of `batch` requests with `context` tokens each, the newest included."""

    def __init__(self, model, batch, context, adapter_slots=None):
        """adapter_slots: of each request, [batch] int32, of a model with room for adapters."""
        config = model.config
        device = next(model.parameters()).device
        self.model = model
        self.adapter_slots = adapter_slots
        generator = torch.Generator(device).manual_seed(batch)
        self.table = scattered_blocks([context] * batch, BLOCK_SIZE, generator, device)
        shape = (1 + self.table.numel(), BLOCK_SIZE, config.num_key_value_heads, config.head_dim)

        def draw():
            return torch.randn(shape, generator=generator, device=device, dtype=model.dtype)

        self.cache = [KVCacheData(k=draw(), v=draw()) for _ in range(config.num_hidden_layers)]
        self.token_ids = torch.randint(config.vocab_size, (batch,), device=device).int()
        self.positions = torch.full((batch,), context - 1, device=device)
        self.seq_lens = torch.full((batch,), context, dtype=torch.int32, device=device)
        self.starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
        self.rows = torch.arange(batch, dtype=torch.int32, device=device)
        self.workspace = make_attention_workspace(model.cache_specs(), device=device)
        self.tokens = torch.zeros(batch, context + 1, dtype=torch.int32, device=device)

    def run(self):
        batch, context = len(self.rows), int(self.table.shape[1]) * BLOCK_SIZE
        metadata = build_attention_metadata(
            query_start_loc=self.starts,
            seq_lens=self.seq_lens,
            row_ids=self.rows,
            block_table=self.table,
            positions=self.positions,
            token_request=self.rows,
            block_size=BLOCK_SIZE,
            max_seqlen_q=1,
            max_seqlen_k=context,
            workspace=self.workspace,
            is_recorded=True,
        )
        shape = Context(
            positions=self.positions,
            is_prefill=False,
            batch_size=batch,
            num_tokens=batch,
            max_q_len=1,
        )
        step = ForwardContext(
            context=shape,
            attn_metadata=metadata,
            kv_cache_data=self.cache,
            adapter_slots=self.adapter_slots,
        )
        with forward_context(step):
            hidden = self.model(self.token_ids, self.positions)
        logits = self.model.compute_logits(hidden)
        choose_greedily(logits, self.tokens, self.rows, self.seq_lens)

    @torch.inference_mode()
    def milliseconds(self, replays=REPLAYS):
        """Returns the median, least and most milliseconds of replays queued back to back."""
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            self.run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 4)]
        for event in events:
            graph.replay()
            event.record()
        torch.cuda.synchronize()
        times = [a.elapsed_time(b) for a, b in pairwise(events[3:])]
        return statistics.median(times), min(times), max(times)


def load(folder):
    """Returns the model of a folder with random weights."""
    return load_model(
        folder, device=torch.device("cuda"), dtype=torch.bfloat16, load_format="dummy"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="folder with a config.json")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=BATCH_SIZES)
    parser.add_argument("--context", type=int, default=256)
    options = parser.parse_args()
    model = load(options.model)
    for batch in options.batch_sizes:
        median, least, most = DecodeStep(model, batch, options.context).milliseconds()
        print(f"batch {batch:>4} {median:8.3f} ms  ({least:.3f} to {most:.3f})", flush=True)


if __name__ == "__main__":
    main()
