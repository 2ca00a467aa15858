"""Where the time of an encoder of images goes: its kernels by kind, and parts of it alone."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from models.kernels.gpu import has_kernels
from models.kernels.tuning.tiles import WideTiles
from tests.bench.kernel_advances import Advance, advances
from tests.bench.kernels import microseconds
from tests.bench.step_engine import traced_events
from tests.bench.tower_floor import FLOP_PER_MS, TowerFloor
from tests.bench.trace_intervals import Work, work_in_order

REPLAYS = 5
WEIGHT_COPIES = 8
"""Weights that a product alone reads in turn, as each layer reads its own."""
PADDED_SIZE = 128
"""Multiples that sizes are padded to, as one of the ways to compute a product."""
WIDE = {
    "192 x 256": WideTiles(groups=3, tokens=256, slots=3),
    "128 x 256": WideTiles(groups=2, tokens=256, slots=4),
    "192 x 128": WideTiles(groups=3, tokens=128, slots=5),
}
"""Tiles of the engine's own product: outputs and rows."""
_ATTENTION = ("segment_attention",)
_PRODUCTS = ("gemm", "nvjet", "cutlass", "xmma", "splitk", "wide_kernel", "matrix_kernel", "cublas")
SDPA = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def kernel_lines(run: Callable[[], object], device: str, floor: TowerFloor) -> list[str]:
    """Profiles runs of an encoder; returns a table of a run's kernels, by kind and by name.

    Nothing on a device that the profiler does not watch.
    """

    def replays() -> None:
        for _ in range(REPLAYS):
            run()
            if device == "cuda":
                torch.cuda.synchronize()

    works = work_in_order(traced_events(replays, device))
    if not works:
        return [f"nothing ran on a device that the profiler watches ({device})"]
    return table_of(works, REPLAYS, floor)


def table_of(works: Sequence[Work], num_runs: int, floor: TowerFloor) -> list[str]:
    """Returns the lines for all kernels of some runs, in order of their start."""
    length = len(works) // num_runs
    runs = [advances(works[index * length :][:length]) for index in range(num_runs)]
    found = [(_kind(work), each) for each, work in zip(_joined(runs), works, strict=False)]
    floors = {"products": floor.products_ms, "attention": floor.attention_ms}
    lines = [f"{length} kernels", f"{'kind':12} {'us':>9} {'floor us':>9} {'n':>5}"]
    for kind in ("products", "attention", "other"):
        own = [each.own for name, each in found if name == kind]
        least = f"{1000 * floors[kind]:9.0f}" if kind in floors else f"{'-':>9}"
        lines.append(f"{kind:12} {sum(own) / num_runs:9.0f} {least} {len(own) // num_runs:5}")
    gaps = sum(each.gap for run in runs for each in run)
    lines.append(f"{'gaps':12} {gaps / num_runs:9.0f}")
    return [*lines, *_by_name([each for _, each in found], num_runs)]


def _joined(runs: Iterable[Sequence[Advance]]) -> Iterator[Advance]:
    for run in runs:
        yield from run


def _kind(work: Work) -> str:
    name = work.name.lower()
    if any(part in name for part in _ATTENTION):
        return "attention"
    return "products" if any(part in name for part in _PRODUCTS) else "other"


def _by_name(found: Sequence[Advance], num_runs: int) -> Iterator[str]:
    """Yields the sums of kernels of one name and launch, the largest first."""
    sums: dict[tuple[str, str], list[float]] = {}
    for each in found:
        sums.setdefault((each.kernel.name, each.kernel.launch), []).append(each.own)
    yield f"{'kernel':38} {'grid/threads':>18} {'each us':>8} {'sum us':>8} {'n':>5}"
    for (name, launch), own in sorted(sums.items(), key=lambda row: -sum(row[1]))[:24]:
        count = len(own) / num_runs
        yield (
            f"{name:38} {launch:>18} {sum(own) / len(own):8.1f} {sum(own) / num_runs:8.0f} "
            f"{count:5.0f}"
        )


def product_times(layer: nn.Module, num_rows: int) -> Iterator[tuple[str, float, float]]:
    """Measures each product of a layer alone in several ways; yields name, us and the floor's us.

    layer: on a GPU, in a 16-bit dtype.
    """
    for name, module in layer.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        weight, bias = module.weight, module.bias
        floor_us = 2 * num_rows * weight.numel() / FLOP_PER_MS * 1000
        x = torch.randn(num_rows, weight.shape[1], dtype=weight.dtype, device=weight.device)
        for way, times_us in _ways(x, weight, bias):
            yield f"{name} {tuple(weight.shape)} {way}", times_us, floor_us


def _ways(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Iterator[tuple[str, float]]:
    from models.kernels.products.wide_linear import wide_linear

    weights = [weight.clone() for _ in range(WEIGHT_COPIES)]
    yield "bias", microseconds([lambda w=w: functional.linear(x, w, bias) for w in weights])
    yield "plain", microseconds([lambda w=w: x @ w.t() for w in weights])
    gelu = [lambda w=w: torch._addmm_activation(bias, x, w.t(), use_gelu=True) for w in weights]
    yield "bias and gelu", microseconds(gelu)
    rows, columns = (-size % PADDED_SIZE for size in weight.shape)
    if rows or columns:
        padded = [functional.pad(w, (0, columns, 0, rows)) for w in weights]
        wider = functional.pad(x, (0, columns))
        yield "plain, padded", microseconds([lambda w=w: wider @ w.t() for w in padded])
    for way, tiles in WIDE.items():
        own = [lambda w=w, tiles=tiles: wide_linear(x, w, tiles) for w in weights]
        yield f"own {way}", microseconds(own)


def dense_attention_times(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, num_segments: int, scale: float
) -> Iterator[tuple[str, float]]:
    """Measures torch's attention of segments of one length; yields the backend and microseconds.

    q, k and v are [N, H, D]. Backends that do not take them are left out.
    """
    if not has_kernels(q.device):
        return
    dense = [each.unflatten(0, (num_segments, -1)).transpose(1, 2) for each in (q, k, v)]
    for name, backend in SDPA.items():
        try:
            with sdpa_kernel(backend):
                yield (
                    name,
                    microseconds(
                        [lambda: functional.scaled_dot_product_attention(*dense, scale=scale)]
                    ),
                )
        except RuntimeError:
            continue
