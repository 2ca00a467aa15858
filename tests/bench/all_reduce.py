"""Times the fused collectives against NCCL's.

    python -m tests.bench.all_reduce [--collective sum|rows] [--ranks 2] [--json out.json]

sum: the all-reduce with residual and norm, once with the norm rounded to FP8 and once without.
NCCL's sum comes with add_rms_norm.
rows: the gather and the reduce-scatter before and after the experts of data-parallel ranks, for as
many rows of each rank.

One process a GPU. Each figure is the slowest rank's mean over a replayed graph of calls, the best
of five replays. Results are compared with those of torch, in rank order, before they are timed.
"""

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

# Before torch is imported: multicast objects can put a host's GPUs out of service.
os.environ.update(
    NCCL_NVLS_ENABLE="0", NVSHMEM_DISABLE_NVLS="1", TORCH_SYMM_MEM_DISABLE_MULTICAST="1"
)

import torch
import torch.distributed as dist
from torch import multiprocessing

from models.ops.elementwise.rms_norm import add_rms_norm
from models.ops.ranks.all_reduce_norm import ordered_sum, ordered_sum_norm
from models.parallel.collectives import gather_into, reduce_scatter_into

HIDDEN_SIZES = (2048, 4096, 7168, 8192)
ROWS = (1, 8, 32, 64, 128, 256, 1024, 2048, 8192)
FEW_ROWS = (1, 4, 16, 32, 64, 128, 256, 512)
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
    """Returns the times and whether the fused sum has the bits of the sum in rank order."""
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

    figures = {
        "fused_us": microseconds(lambda: fused.add_norm(x, residual, weight, EPS)),
        "fused_fp8_us": microseconds(
            lambda: fused.add_rounded_norm(x, residual, weight, EPS, is_blocked=True)
        ),
        "nccl_us": microseconds(nccl),
        "is_exact": is_exact,
        "is_two_shot": fused.is_two_shot(num_rows),
    }
    fused.check()
    return figures


def measure_rows(fused, hidden: int, num_rows: int) -> dict[str, float | bool]:
    """Returns the times of both collectives both ways, and whether results have torch's bits."""
    size, rank = dist.get_world_size(), dist.get_rank()
    wide = torch.randn(size * num_rows, hidden, device="cuda", dtype=torch.bfloat16)
    parts = wide.new_empty(size, *wide.shape)
    gather_into(parts, wide, "all")
    own = slice(rank * num_rows, (rank + 1) * num_rows)
    share = ordered_sum(parts[:, own]).to(wide.dtype)
    is_exact = torch.equal(fused.reduce_scatter(wide), share)
    x = wide[:num_rows]
    gathered = fused.gather_rows(x)
    is_exact &= torch.equal(gathered, parts[:, :num_rows].flatten(0, 1))
    stacked = gathered.view(size, num_rows, hidden)
    figures = {
        "fused_gather_us": microseconds(lambda: fused.gather_rows(x)),
        "nccl_gather_us": microseconds(lambda: gather_into(stacked, x, "all")),
        "fused_scatter_us": microseconds(lambda: fused.reduce_scatter(wide)),
        "nccl_scatter_us": microseconds(lambda: reduce_scatter_into(share, wide, "all")),
        "is_exact": is_exact,
    }
    fused.check()
    return figures


COLLECTIVES = {"sum": (measure, ROWS), "rows": (measure_rows, FEW_ROWS)}


def run(rank: int, meeting: str, options: argparse.Namespace) -> None:
    """Measures as one rank; the first one prints."""
    size = options.ranks
    from models.kernels.ranks.exchange import Exchange
    from models.kernels.ranks.rank_memory import RankMemory

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", init_method=f"file://{meeting}", rank=rank, world_size=size, device_id=device
    )
    measure_one, numbers_of_rows = COLLECTIVES[options.collective]
    results = []
    for hidden in options.hidden_sizes:
        memory = RankMemory.of_group(
            dist.group.WORLD, hidden_size=hidden, dtype=torch.bfloat16, device=device
        )
        fused = Exchange(memory, timeout_s=5)
        for num_rows in numbers_of_rows:
            figures = measure_one(fused, hidden, num_rows)
            results.append({"hidden_size": hidden, "rows": num_rows, **figures})
            if rank == 0:
                line = "  ".join(
                    f"{name} {value:.2f}" if isinstance(value, float) else f"{name} {value}"
                    for name, value in figures.items()
                )
                print(f"{num_rows:5} x {hidden:5}  {line}", flush=True)
    if rank == 0 and options.json is not None:
        options.json.write_text(json.dumps(results, indent=2))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--collective", choices=COLLECTIVES, default="sum")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden-sizes", type=int, nargs="+", default=HIDDEN_SIZES)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if torch.cuda.device_count() < options.ranks:
        parser.error(f"{options.ranks} ranks take {options.ranks} GPUs; torch sees "
                     f"{torch.cuda.device_count()}")  # fmt: skip
    with TemporaryDirectory() as folder:
        arguments = (f"{folder}/meeting", options)
        multiprocessing.spawn(run, args=arguments, nprocs=options.ranks)


if __name__ == "__main__":
    main()
