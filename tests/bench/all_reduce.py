"""Times the fused all-reduce with residual and norm against NCCL's sums.

NCCL's sum of all rows on each rank comes with add_rms_norm; its sum of a share of them with the
norm of the share and a gather, as the pass sequence_parallel has it.

    python -m tests.bench.all_reduce [--ranks 2] [--json out.json]

One process a GPU. Each figure is the slowest rank's mean over a replayed graph of calls, the best
of five replays. Sums are compared with those in rank order before they are timed.
"""

import argparse
import json
import os
from collections.abc import Callable
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

# Before torch is imported: multicast objects can put a host's GPUs out of service.
os.environ.update(
    NCCL_NVLS_ENABLE="0", NVSHMEM_DISABLE_NVLS="1", TORCH_SYMM_MEM_DISABLE_MULTICAST="1"
)

import torch
import torch.distributed as dist
from torch import multiprocessing

from models.ops.communication import sequence_parallel_norm
from models.ops.communication.all_reduce_norm import ordered_sum_norm
from models.ops.elementwise.rms_norm import add_rms_norm

HIDDEN_SIZES = (2048, 4096, 8192)
ROWS = (1, 8, 32, 64, 128, 256, 1024, 2048, 8192)
CALLS = 50
EPS = 1e-6


def microseconds(call: Callable[[], object]) -> float:
    """Returns the time of one call inside a graph, of the slowest rank."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(5):
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            begin.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    slowest = torch.tensor([min(times)], device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def measure(fused, hidden: int, num_rows: int) -> dict[str, float | bool]:
    """Returns both times and whether the fused sum has the bits of the sum in rank order."""
    x = torch.randn(num_rows, hidden, device="cuda", dtype=torch.bfloat16)
    residual, weight = torch.zeros_like(x), torch.ones_like(x[0])
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    expected = residual.clone()
    ordered_sum_norm(torch.stack(parts), expected, weight, EPS)
    fused.add_norm(x, residual, weight, EPS)
    is_exact = torch.equal(residual, expected)
    x *= 1e-3
    summed = x.clone()

    def nccl() -> None:
        dist.all_reduce(summed)
        add_rms_norm(summed, residual, weight, EPS)

    def shared() -> None:
        sequence_parallel_norm.sequence_parallel_norm(summed, residual, weight, EPS, "all", False)

    figures = {
        "fused_us": microseconds(lambda: fused.add_norm(x, residual, weight, EPS)),
        "nccl_us": microseconds(nccl),
        "shared_us": microseconds(shared),
        "is_exact": is_exact,
        "is_two_shot": fused.is_two_shot(num_rows),
    }
    fused.check()
    return figures


def run(rank: int, size: int, meeting: str, output: Path | None) -> None:
    """Measures as one rank; the first one prints."""
    from models.ops.triton.communication.exchange import Exchange

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", init_method=f"file://{meeting}", rank=rank, world_size=size, device_id=device
    )
    sequence_parallel_norm.SHARE_BYTES = 1
    results, fused, width = [], None, 0
    for hidden, num_rows in product(HIDDEN_SIZES, ROWS):
        if width != hidden:
            width = hidden
            fused = Exchange(
                dist.group.WORLD,
                hidden_size=hidden,
                dtype=torch.bfloat16,
                device=device,
                timeout_s=5,
            )
        figures = measure(fused, hidden, num_rows)
        results.append({"hidden_size": hidden, "rows": num_rows, **figures})
        if rank == 0:
            ways = "two-shot" if figures["is_two_shot"] else "one-shot"
            print(
                f"{num_rows:5} x {hidden:5}  fused {figures['fused_us']:8.2f} us ({ways})  "
                f"NCCL and norm {figures['nccl_us']:8.2f} us, of shares "
                f"{figures['shared_us']:8.2f} us" + ("" if figures["is_exact"] else "  WRONG"),
                flush=True,
            )
    if rank == 0 and output is not None:
        output.write_text(json.dumps(results, indent=2))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if torch.cuda.device_count() < options.ranks:
        parser.error(f"{options.ranks} ranks take {options.ranks} GPUs; torch sees "
                     f"{torch.cuda.device_count()}")  # fmt: skip
    with TemporaryDirectory() as folder:
        arguments = (options.ranks, f"{folder}/meeting", options.json)
        multiprocessing.spawn(run, args=arguments, nprocs=options.ranks)


if __name__ == "__main__":
    main()
