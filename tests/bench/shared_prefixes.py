"""Times decode attention of requests with one beginning, with and without reading it once.

    python -m tests.bench.shared_prefixes [--steps] [--queries 4] [--json out.json]

One layer of Qwen3-8B, norm, rotation and cache write included. The requests' tables name the same
blocks, so without sharing the second-level cache serves many of their reads. floor: what must be
read at least, the shared keys once. Lines of nothing shared say what an empty plan costs, which
only graphs of steps that share have. From these comes least_shared_bytes of the GPU's tables. It
takes under a minute; --steps measures whole decode steps instead (shared_steps), in about two.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from models.kernels.attention.attention import attend
from models.kernels.attention.decode.prefix_attention import NewTokens, prefix_attention
from models.ops.attention.attention_metadata import build_attention_metadata
from tests.bench import kernels
from tests.bench.kernels import BYTES_PER_US, cache_bytes, copies, microseconds
from tests.bench.model_folder import shape_names
from tests.bench.report import Report
from tests.bench.shared_steps import measure_steps
from tests.support.attention_case import AttentionCase, Heads, make_cache, make_case, token_request
from tests.support.prefix_case import with_shared

HEADS = Heads(num_heads=32, num_kv_heads=8, head_dim=128)
BLOCK_SIZE = 16
BATCHES = (8, 32, 48, 128)
SHARED = (3008, 16000)
SHORT = (256, 512, 1024)
"""Shared keys of the lines that decide how short a prefix may be."""
FEW = (4, 8, 16)
OWN = 256
"""Keys of each request after the prefix."""
UNSHARED = 1024
"""Keys of each request where nothing is shared."""


def make_shared(
    batch: int, shared: int, own: int, *, has_fp8_cache: bool, queries: int = 1
) -> AttentionCase:
    """Returns a step of decodes whose sequences begin with the same blocks."""
    case = make_case([queries] * batch, [own] * batch, HEADS, dtype=torch.bfloat16, device="cuda")
    metadata = case.metadata
    num_own, num_shared = case.cache.k.shape[0], shared // BLOCK_SIZE
    first = torch.arange(num_own, num_own + num_shared, dtype=torch.int32, device="cuda")
    shape = (num_own + num_shared, BLOCK_SIZE, HEADS.num_kv_heads, HEADS.head_dim)
    drawn = [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    metadata = build_attention_metadata(
        query_start_loc=metadata.query_start_loc,
        seq_lens=metadata.seq_lens + shared,
        row_ids=metadata.row_ids,
        block_table=torch.cat((first.expand(batch, -1), metadata.block_tables), 1),
        positions=case.positions + shared,
        token_request=token_request(metadata.query_start_loc),
        block_size=BLOCK_SIZE,
        max_seqlen_q=queries,
        max_seqlen_k=own + shared,
        workspace=metadata.workspace,
    )
    cache = make_cache(*drawn, is_fp8=has_fp8_cache)
    case = replace(case, cache=cache, metadata=metadata, positions=case.positions + shared)
    prefixes = [(list(range(batch)), num_shared)] if shared else []
    return with_shared(case, prefixes)


def calls_of(cases: list[AttentionCase], *, shares: bool) -> list[Callable[[], object]]:
    """Returns launches over the caches of all cases, with the step of the first."""
    first = cases[0]
    metadata = first.metadata if shares else replace(first.metadata, prefix_plan=None)
    output = torch.empty_like(first.q).contiguous()

    def call(cache):
        return lambda: attend(
            first.q, first.k, first.v, output, cache, metadata, first.transform, None, None,
            HEADS.head_dim**-0.5, 0.0,
        )  # fmt: skip

    return [call(case.cache) for case in cases]


def prefix_calls(batch: int, shared: int, *, has_fp8_cache: bool) -> list[Callable[[], object]]:
    """Returns launches of prefix_attention alone, over several caches."""
    num_bytes = kernels.cache_bytes(HEADS, 1, shared, has_fp8_cache=has_fp8_cache)
    cases = [
        make_shared(batch, shared, BLOCK_SIZE, has_fp8_cache=has_fp8_cache)
        for _ in range(kernels.copies(num_bytes, 24))
    ]
    first = cases[0]
    slots = first.metadata.slot_mapping
    new = NewTokens(k=first.k, v=first.v, transform=first.transform, slot_mapping=slots)

    def call(cache):
        return lambda: prefix_attention(
            first.q, cache, first.metadata, new, scale=HEADS.head_dim**-0.5, soft_cap=0.0
        )

    return [call(case.cache) for case in cases]


def measure(
    report: Report,
    name: str,
    batch: int,
    shared: int,
    own: int,
    *,
    has_fp8_cache: bool,
    queries: int = 1,
) -> None:
    """Adds the times of one step with and without sharing."""
    num_bytes = cache_bytes(HEADS, 1, shared + batch * own, has_fp8_cache=has_fp8_cache)
    cases = [
        make_shared(batch, shared, own, has_fp8_cache=has_fp8_cache, queries=queries)
        for _ in range(copies(num_bytes, 24))
    ]
    for way, shares in (("on", True), ("off", False)):
        took = microseconds(calls_of(cases, shares=shares), rounds=2)
        report.add(f"{name} {way}", [took], "us", floor=num_bytes / BYTES_PER_US)


def main() -> None:
    """Measures all points and prints them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", action="store_true")
    parser.add_argument("--queries", type=int, default=1, help="of a request: 1 and its drafts")
    parser.add_argument("--shape", choices=shape_names(), default="qwen3-8b")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    report = Report("shared_prefixes", path=arguments.json, shape=arguments.shape)
    if arguments.steps:
        measure_steps(report, arguments.shape, arguments.device)
        print(report.table())
        return
    queries = arguments.queries
    points = [(batch, shared) for shared in SHARED for batch in BATCHES]
    points += [(batch, shared) for shared in SHORT for batch in FEW]
    for has_fp8_cache in (False, True):
        kind = "fp8" if has_fp8_cache else "bf16"
        for batch, shared in points:
            name = f"{kind} {batch} x {shared}"
            measure(report, name, batch, shared, OWN, has_fp8_cache=has_fp8_cache, queries=queries)
        for batch in BATCHES:
            name = f"{kind} {batch}, nothing shared"
            measure(report, name, batch, 0, UNSHARED, has_fp8_cache=has_fp8_cache, queries=queries)
    print(report.table())


if __name__ == "__main__":
    main()
