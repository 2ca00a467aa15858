"""Names of the compiler passes, in the order in which they run."""

from typing import Literal, get_args

PassName = Literal[
    "canonical",
    "linear_gate",
    "multi_stream",
    "linear_residual",
    "all_reduce_norm",
    "residual_norm",
    "norm_linear",
    "norm_quant",
    "packed_residual",
    "sequence_parallel",
    "async_tp",
    "activation_quant",
    "attention_quant",
    "qk_norm_rope_cache",
    "clean_up",
]
PASS_NAMES: tuple[PassName, ...] = get_args(PassName)
_SHARED_ROWS = {"sequence_parallel", "async_tp"}
"""With two H200 prompts of 8192 tokens take up to 12 % longer with the first, 6 to 33 % with the
second, which builds on it (Qwen3-8B in bfloat16 and FP8, 2026-11)."""
DEFAULT_PASSES = tuple(name for name in PASS_NAMES if name not in _SHARED_ROWS)
"""Passes that run unless others are named."""
