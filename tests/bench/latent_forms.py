"""Times both forms of latent attention, to fill the table of models.kernels latent_forms.

    python -m tests.bench.latent_forms [--json out.json] [--heads 128,16] [--queries 64,...]
        [--kv-cache-dtype fp8_e4m3]

One request attends with DeepSeek-V3's heads, 128 or one rank's share, from 64 to 8192
query tokens after contexts of up to 32k. Either form counts with all that it takes: the absorbed
one the projection of queries and of attended vectors, the expanded one that of cached entries. The
last lines name, for each number of heads, the least number of query tokens from which on the
expanded form is faster after every context: the table's entry.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from models.kernels.attention.latent.expanded_attention import expanded_attention
from models.kernels.attention.latent.latent_attention import latent_attention
from models.kernels.attention.latent.latent_forms import least_expanded_queries
from tests.bench.kernels import microseconds
from tests.support.latent_case import LatentCase, make_latent_case

HEAD = {"latent_dim": 512, "rope_dim": 64, "plain_dim": 128, "value_dim": 128}
QUERIES = (64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
CONTEXTS = (0, 1024, 4096, 8192, 16384, 32768)

Figures = dict[str, float]
"""Microseconds of a form, by its name."""


def absorbed(case: LatentCase, output: torch.Tensor) -> None:
    """Attends to latent vectors."""
    queries = case.queries
    attended = output.new_empty(*output.shape[:2], queries.sizes.latent)
    latent_attention(queries.absorbed(), case.cache, case.metadata, attended, case.scale)
    output.copy_(queries.values(attended))


def expanded(case: LatentCase, output: torch.Tensor) -> None:
    """Attends to keys and values that are expanded piece by piece."""
    [chunk] = case.metadata.chunks
    expanded_attention(case.queries, case.cache, case.metadata, chunk, output, case.scale)


def measure(num_heads: int, num_queries: int, context: int, *, has_fp8_cache: bool) -> Figures:
    """Times both forms for one request.

    Raises:
        AssertionError: they differ by more than rounding.
    """
    case = make_latent_case(
        [num_queries], [context + num_queries], num_heads=num_heads, **HEAD,
        dtype=torch.bfloat16, device="cuda", has_fp8_cache=has_fp8_cache,
    )  # fmt: skip
    case = replace(case, is_prefill=True)
    outputs, figures = [], {}
    for form in (absorbed, expanded):
        output = case.queries.plain.new_empty(num_queries, num_heads, HEAD["value_dim"])
        figures[form.__name__] = microseconds([partial(form, case, output)])
        outputs.append(output.double())
    error = (outputs[0] - outputs[1]).norm() / outputs[0].norm()
    assert error < 0.03, f"the forms differ by {float(error):.2g} of the norm"
    return figures


def least_queries(results: Sequence[dict[str, float]]) -> float | None:
    """Returns from how many query tokens on the expanded form always wins; None if never."""
    lost = [each["queries"] for each in results if each["expanded"] >= each["absorbed"]]
    won = sorted({each["queries"] for each in results if each["queries"] > max(lost, default=0)})
    return won[0] if won else None


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--heads", default="128,16")
    parser.add_argument("--queries", default=",".join(map(str, QUERIES)))
    parser.add_argument("--contexts", default=",".join(map(str, CONTEXTS)))
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8_e4m3"), default="auto")
    arguments = parser.parse_args()
    has_fp8_cache = arguments.kv_cache_dtype == "fp8_e4m3"
    heads, queries, contexts = (
        [int(number) for number in listed.split(",")]
        for listed in (arguments.heads, arguments.queries, arguments.contexts)
    )
    results = []
    for num_heads in heads:
        for num_queries in queries:
            for context in contexts:
                figures = measure(num_heads, num_queries, context, has_fp8_cache=has_fp8_cache)
                shape = {"heads": num_heads, "queries": num_queries, "context": context}
                results.append(shape | figures)
                ratio = figures["absorbed"] / figures["expanded"]
                print(
                    f"{num_heads:4} heads {num_queries:6} queries {context:6} before  "
                    f"absorbed {figures['absorbed']:11.1f} us  "
                    f"expanded {figures['expanded']:11.1f} us  x{ratio:.2f}",
                    flush=True,
                )
                torch.cuda.empty_cache()
    for num_heads in heads:
        least = least_queries([each for each in results if each["heads"] == num_heads])
        print(f"{num_heads:4} heads: expanded from {least} queries on")
    case = make_latent_case([2], [2], num_heads=1, **HEAD)
    print("by arithmetic or table:", least_expanded_queries(case.queries.sizes))
    if arguments.json:
        record = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "kv_cache_dtype": arguments.kv_cache_dtype,
        }
        arguments.json.write_text(json.dumps({**record, "results": results}, indent=1))


if __name__ == "__main__":
    main()
