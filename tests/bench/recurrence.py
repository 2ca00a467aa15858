"""Times the kernels of recurrent states against the limit of memory.

    python -m tests.bench.recurrence [--requests 1 32 256] [--tokens 2048 8192] [--k-heads 16]

Microseconds of one layer, the median of replays of a graph of many launches that walk over more
states than the second-level cache holds, beside the time of reading and writing what is read and
written once. By default the layer is that of Qwen3.5-35B-A3B.
"""

import argparse
from dataclasses import replace
from functools import partial

import torch

from models.state_cache import StateSpec
from tests.bench.kernels import BYTES_PER_US, copies, microseconds
from tests.support.recurrence_case import make_conv_case, make_delta_case, make_step

UNIT_BYTES = 2**14
REGIONS = 2


def cases_of(query_lens, options):
    """Returns steps of a convolution and of the rule after it, by the function's name."""
    channels = 2 * options.k_heads * options.dim + options.heads * options.dim
    spec = StateSpec(
        num_heads=options.heads, head_rows=options.dim, head_columns=options.dim,
        conv_channels=channels, conv_width=4, conv_dtype=torch.bfloat16,
    )  # fmt: skip
    num_bytes = len(query_lens) * spec.num_bytes

    def step(seed):
        return make_step(
            query_lens, spec, unit_bytes=UNIT_BYTES, regions=REGIONS, device="cuda", seed=seed,
            new=(),
        )  # fmt: skip

    steps = [step(seed) for seed in range(copies(num_bytes, 32))]
    conv = [make_conv_case(each, dtype=torch.bfloat16, has_bias=False) for each in steps]
    delta = [make_delta_case(each, options.k_heads, dtype=torch.bfloat16) for each in steps]
    return {
        "causal_conv": [replace(each, x=each.x.contiguous()) for each in conv],
        "gated_delta_rule": [replace(each, qkv=each.qkv.contiguous()) for each in delta],
    }


def floor(name, query_lens, case):
    """Returns the microseconds of reading and writing states, inputs and outputs."""
    spec, num_tokens = case.step.cache.spec, sum(query_lens)
    kept = spec.num_conv_elements * 2
    if name == "causal_conv":
        num_bytes = 2 * len(query_lens) * kept + 4 * num_tokens * spec.conv_channels
    else:
        outputs = spec.num_heads * spec.head_columns
        num_bytes = 2 * len(query_lens) * (spec.num_bytes - kept)
        num_bytes += 2 * num_tokens * (spec.conv_channels + outputs)
    return num_bytes / BYTES_PER_US


def measure(label, query_lens, options):
    for name, cases in cases_of(query_lens, options).items():
        output = cases[0].run()
        took = microseconds([partial(case.run_into, output) for case in cases])
        least = floor(name, query_lens, cases[0])
        print(f"{label:18} {name:18} {took:9.1f} us, floor {least:8.1f} us", flush=True)
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, nargs="*", default=[1, 32, 256])
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--tokens", type=int, nargs="*", default=[2048, 8192])
    parser.add_argument("--k-heads", type=int, default=16)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--dim", type=int, default=128)
    options = parser.parse_args()
    for batch in options.requests:
        measure(f"decode {batch}", [1] * batch, options)
        measure(f"drafts {batch}", [1 + options.drafts] * batch, options)
    for num_tokens in options.tokens:
        measure(f"prefill {num_tokens}", [num_tokens], options)
        measure(f"prefill 8 x {num_tokens // 8}", [num_tokens // 8] * 8, options)


if __name__ == "__main__":
    main()
