"""One rank of a tensor-parallel forward pass on the CPU.

python -m tests.support.tensor_parallel_rank RANK SIZE CHECKPOINT RENDEZVOUS_FILE OUTPUT_FILE
    [keep_quantized]
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from models.loading.loader import load_model
from models.parallel.group import ParallelGroup
from tests.support.paged_runner import PagedRunner

TOKEN_IDS = [5, 96, 0, 48, 49, 17, 33, 80, 2, 61]


def main() -> None:
    rank, size, checkpoint, rendezvous, output, *options = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=int(rank), world_size=int(size)
    )
    group = ParallelGroup(rank=int(rank), size=int(size))
    model = load_model(
        Path(checkpoint),
        device=torch.device("cpu"),
        dtype=torch.float32,
        group=group,
        keep_quantized="keep_quantized" in options,
    )
    runner = PagedRunner(model)
    torch.save(runner.run(runner.add(TOKEN_IDS), chunk_size=4), output)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
