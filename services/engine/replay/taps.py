"""Copies the inputs and outputs of attention, with and without graphs."""

from typing import Any

import torch
from torch import Tensor

import models.ops.attention.attention
import models.ops.attention.block_sparse_attention
import models.ops.attention.compressed_attention
import models.ops.attention.latent_attention  # noqa: F401  # each registers an operator
from models.forward_context import ForwardContext, get_forward_context
from models.operands.head_transform import HeadTransform
from models.operands.latent_entries import LatentEntries, LatentTransform
from models.ops.attention.head_transform import transform_heads
from models.ops.attention.latent_transform import transform_latents
from models.ops.products.activation_rounding import leaves_rounded
from models.ops.products.fp8_linear import round_in_place
from services.engine.compilation.graphs.dispatch_mode import DispatchMode

INDEX_INPUTS = ("index_q", "index_k", "index_weights")
"""Arguments that are None where a model has no indexer."""
INPUTS = {
    torch.ops.octavo.unified_attention_with_output.default: ("q", "k", "v"),
    torch.ops.octavo.latent_attention_with_output.default: (
        *("q_plain", "q_rotated", "latent", "k_rotated"),
        *INDEX_INPUTS,
    ),
    torch.ops.octavo.block_sparse_attention_with_output.default: (
        *("q", "k", "v", "index_q", "index_k"),
    ),
    torch.ops.octavo.compressed_attention_with_output.default: (
        "q",
        "recent",
        "index_q",
        "index_weights",
    ),
}
"""The inputs of each attention operator."""
OUTPUT = "output"

Tap = tuple[int, int, str]
"""A tensor of attention: the pass that it belongs to, its layer and its name.

Pass 0 is the model's; the passes of draft layers after it count from 1.
"""


class AttentionTaps(DispatchMode):
    """Copies the tensors of every attention layer while active.

    tensors: of the last passes. A graph captured meanwhile contains the copies, so each replay
    updates `tensors`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[Tap, Tensor] = {}
        self._context: ForwardContext | None = None
        self._pass = 0

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operation, and copies tensors of attention."""
        inputs = INPUTS.get(func)
        if inputs is None:
            return func(*args, **kwargs)
        names = (argument.name for argument in func._schema.arguments)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        named = dict(given)
        layer = named["layer_index"]
        self._count_pass()
        if named.get("cos") is not None:
            named |= _transformed(named) if "q" in named else _transformed_latents(named)
        for name in inputs:  # before the call, which may write to them
            if named.get(name) is not None:
                self._keep(layer, name, named[name])
        output = given[OUTPUT]
        is_rounded = leaves_rounded(output, may_round=given.pop("rounds", False))
        result = func(**given)
        self._keep(layer, OUTPUT, output)
        if is_rounded:
            # The model as written rounds after attention.
            round_in_place(output)
        return result

    def _count_pass(self) -> None:
        """Counts the passes of draft layers, each with its own context.

        A step's first takes all its query tokens or follows a pass of the model.
        """
        context = get_forward_context()
        if context is self._context:
            return
        self._context = context
        if context.spec_decode_metadata is None:
            self._pass = 0
        else:
            self._pass = 1 if context.context.max_q_len > 1 else self._pass + 1

    def _keep(self, layer: int, name: str, tensor: Tensor) -> None:
        tap = self._pass, layer, name
        kept = self.tensors.get(tap)
        if kept is None or kept.shape != tensor.shape:
            self.tensors[tap] = tensor.clone()
        else:
            # The same memory, because a graph under capture keeps its address.
            kept.copy_(tensor)


def _transformed(named: dict[str, Any]) -> dict[str, Tensor]:
    """Returns the queries and keys that attention itself normalises and rotates.

    A compiler's pass puts that into the operator; the model as written does it before.
    """
    transform = HeadTransform(
        cos=named["cos"],
        signed_sin=named["signed_sin"],
        q_weight=named["q_weight"],
        k_weight=named["k_weight"],
        eps=named["eps"],
    )
    q, k = transform_heads(named["q"], named["k"], transform)
    return {"q": q, "k": k}


def _transformed_latents(named: dict[str, Any]) -> dict[str, Tensor]:
    """Returns the queries and entries that latent attention itself normalises and rotates."""
    transform = LatentTransform(
        cos=named["cos"],
        signed_sin=named["signed_sin"],
        weight=named["latent_weight"],
        eps=named["eps"],
    )
    entries = LatentEntries(latent=named["latent"], rotated=named["k_rotated"], index_keys=None)
    q_rotated, entries = transform_latents(named["q_rotated"], entries, transform)
    return {"q_rotated": q_rotated, "latent": entries.latent, "k_rotated": entries.rotated}
