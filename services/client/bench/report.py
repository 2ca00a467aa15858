"""Results of a benchmark, for people and for machines."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from services.client.bench.runner import Run
from services.client.bench.workload import Load

PERCENTILES = (50, 90, 99)
_TITLES = {
    "ttft_ms": "time to first token (ms)",
    "inter_token_ms": "between tokens (ms)",
    "e2e_ms": "whole request (ms)",
}


def report(run: Run, load: Load, target: str) -> dict[str, Any]:
    """Returns a benchmark's result in a form that JSON can hold; latencies in milliseconds."""
    served = [timing for timing in run.timings if timing.error is None]
    errors = [timing.error for timing in run.timings if timing.error is not None]
    output_tokens = sum(timing.output_tokens for timing in served)
    return {
        "target": target,
        "load": asdict(load),
        "elapsed_s": run.elapsed_s,
        "num_served": len(served),
        "num_failed": dict(Counter(error.code for error in errors)),
        "first_failure": {error.code: str(error) for error in reversed(errors)},
        "prompt_tokens": sum(timing.prompt_tokens for timing in served),
        "output_tokens": output_tokens,
        "requests_per_s": len(served) / run.elapsed_s,
        "output_tokens_per_s": output_tokens / run.elapsed_s,
        "ttft_ms": _percentiles([t.ttft_s for t in served if t.ttft_s is not None]),
        "inter_token_ms": _percentiles([gap for timing in served for gap in timing.gaps_s]),
        "e2e_ms": _percentiles([timing.elapsed_s for timing in served]),
    }


def table_of(result: dict[str, Any]) -> Table:
    """Returns a result as a table."""
    failed = sum(result["num_failed"].values())
    table = Table(
        "latency",
        *(f"p{percentile}" for percentile in PERCENTILES),
        "mean",
        title=f"{result['target']}: {result['num_served']} served, {failed} failed",
        caption=(
            f"{result['requests_per_s']:.2f} requests/s, "
            f"{result['output_tokens_per_s']:.0f} output tokens/s, {result['elapsed_s']:.1f} s"
        ),
    )
    for name, title in _TITLES.items():
        cells = [result[name][f"p{percentile}"] for percentile in PERCENTILES]
        cells.append(result[name]["mean"])
        table.add_row(title, *("-" if cell is None else f"{cell:.2f}" for cell in cells))
    return table


def _percentiles(values_s: Sequence[float]) -> dict[str, float | None]:
    """Returns percentiles and mean in milliseconds; None where nothing was measured."""
    if not values_s:
        return {**{f"p{percentile}": None for percentile in PERCENTILES}, "mean": None}
    # Only here: its import takes a quarter of the time of every other command.
    import numpy as np

    values_ms = np.asarray(values_s) * 1000
    return {
        **{f"p{p}": float(np.percentile(values_ms, p)) for p in PERCENTILES},
        "mean": float(values_ms.mean()),
    }
