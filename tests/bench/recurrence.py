"""Times the kernels of recurrent states against the limit of memory.

    python -m tests.bench.recurrence [--only conv,gdn,kda,mamba2,lightning,norm] [--drafts 3]
        [--requests 1,32,256] [--tokens 2048,8192]

Microseconds of one layer, the median of replays of a graph of many launches that walk over more
states than the second-level cache holds, beside the time of reading and writing what is read and
written once. A decode computes one token of each request, a draft row 2 to 1 + k, of requests with
as many states; prompts run in chunks. Layers are those of Qwen3.5-35B-A3B (convolution, gated
DeltaNet and norm; KDA with as many heads of keys), Nemotron-3-Nano (Mamba 2) and MiniMax-Text
(lightning attention).
"""

import argparse
from dataclasses import fields, replace
from functools import partial

import torch

from models.kernels.elementwise.gated_rms_norm import gated_rms_norm
from models.state_cache import StateSpec
from tests.bench.kernels import BYTES_PER_US, copies, microseconds
from tests.bench.settings import list_of, list_of_numbers
from tests.support.recurrence_case import (
    make_conv_case,
    make_delta_case,
    make_linear_case,
    make_space_case,
    make_step,
    state_spec,
)

UNIT_BYTES = 2**14
REGIONS = 2
BF16 = torch.bfloat16
CONV = StateSpec(conv_channels=8192, conv_width=4, conv_dtype=BF16)
FULL = state_spec(32, 128, 128)
KINDS = {
    "conv": (CONV, partial(make_conv_case, dtype=BF16, has_bias=False)),
    "gdn": (FULL, partial(make_delta_case, num_k_heads=16, dtype=BF16)),
    "kda": (FULL, partial(make_delta_case, num_k_heads=32, dtype=BF16, decays_channels=True)),
    "mamba2": (state_spec(64, 64, 128), partial(make_space_case, num_groups=8, dtype=BF16)),
    "lightning": (state_spec(64, 128, 128), partial(make_linear_case, dtype=BF16)),
}
"""The state of a layer, and what makes a step's inputs."""
NORM = "norm"


def cases_of(kind, query_lens, num_slots):
    """Returns as many steps of a kernel as flush the second-level cache."""
    spec, make = KINDS[kind]
    # States of all requests, but for the few elements of a convolution that is not measured.
    num_bytes = len(query_lens) * num_slots * spec.num_bytes
    sizes = {"unit_bytes": UNIT_BYTES, "regions": REGIONS, "num_slots": num_slots, "new": ()}
    seeds = range(copies(num_bytes, 32))
    steps = (make_step(query_lens, spec, device="cuda", seed=seed, **sizes) for seed in seeds)
    # As projections are: aligned.
    return [replace(each, **_aligned(each)) for each in map(make, steps)]


def _aligned(case):
    tensors = ((each.name, getattr(case, each.name)) for each in fields(case))
    return {name: x.contiguous() for name, x in tensors if isinstance(x, torch.Tensor)}


def floor_us(case, output, query_lens):
    """Returns the microseconds of reading inputs, writing outputs, and both of states."""
    spec, num_slots = case.step.cache.spec, case.step.cache.num_slots
    state = spec.num_rows * spec.row_bytes or spec.num_conv_elements * spec.conv_dtype.itemsize
    num_kept = sum(min(each, num_slots) for each in query_lens)
    tensors = [*_aligned(case).values(), output]
    num_bytes = sum(each.numel() * each.itemsize for each in tensors)
    return (num_bytes + (len(query_lens) + num_kept) * state) / BYTES_PER_US


def measure(label, kind, query_lens, num_slots=1):
    """Prints the time of a kernel for requests of some tokens."""
    if kind == NORM:
        us, least = norm_us(sum(query_lens))
    else:
        cases = cases_of(kind, query_lens, num_slots)
        output = cases[0].run()
        us = microseconds([partial(case.run_into, output) for case in cases])
        least = floor_us(cases[0], output, query_lens)
        del cases
    print(f"{kind:10} {label:18} {us:9.1f} us, floor {least:8.1f} us", flush=True)
    torch.cuda.empty_cache()


def norm_us(num_tokens):
    """Returns the time of the gated norm of a layer's heads, and of reading and writing once."""
    shape, weight = (num_tokens, 32 * 128), torch.ones(128, device="cuda", dtype=BF16)
    count = copies(3 * 2 * num_tokens * shape[1], 32)
    inputs = [torch.randn(2, *shape, device="cuda").to(BF16) for _ in range(count)]
    calls = [
        partial(gated_rms_norm, x, gate, weight, 1e-6, has_silu=True, gates_first=False)
        for x, gate in inputs
    ]
    return microseconds(calls), 3 * 2 * num_tokens * shape[1] / BYTES_PER_US


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", type=list_of(*KINDS, NORM), default=[*KINDS, NORM])
    parser.add_argument("--requests", type=list_of_numbers, default=[1, 32, 256])
    parser.add_argument("--drafts", type=int, default=3, help="most drafts of a request")
    parser.add_argument("--tokens", type=list_of_numbers, default=[2048, 8192], help="of prompts")
    options = parser.parse_args()
    for kind in options.only:
        for batch in options.requests:
            measure(f"decode {batch}", kind, [1] * batch)
        for drafts in range(1, options.drafts + 1):
            for batch in options.requests[:-1]:
                measure(f"{drafts} drafts {batch}", kind, [1 + drafts] * batch, 1 + drafts)
        for num_tokens in options.tokens:
            measure(f"prefill {num_tokens}", kind, [num_tokens])
            measure(f"prefill 8 x {num_tokens // 8}", kind, [num_tokens // 8] * 8)


if __name__ == "__main__":
    main()
