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
    "activation_quant",
    "attention_quant",
    "qk_norm_rope_cache",
    "clean_up",
]
PASS_NAMES: tuple[PassName, ...] = get_args(PassName)
