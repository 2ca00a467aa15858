"""Names the tensors of a GGUF file as the model's Hugging Face checkpoint does.

Source: github.com/ggml-org/llama.cpp, gguf-py/gguf/tensor_mapping.py and convert_hf_to_gguf.py.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from models.gguf.errors import GgufError
from models.gguf.file import GgufTensor
from models.gguf.joined import JOINS, Join, Layout
from models.gguf.metadata import Metadata

_BLOCK = re.compile(r"blk\.(?P<layer>\d{1,4})\.(?P<part>\w+)\.(?P<kind>weight|bias)")
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_OF_CONFIG = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that `models.gguf.config` reads."""
_CORRECTION = "e_score_correction_bias"
_SINKS = "self_attn.sinks"
"""Parameters; the other names are of modules."""
_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_sinks": _SINKS,
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "exp_probs_b": f"mlp.gate.{_CORRECTION}",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_GEMMA = {**_PARTS, "ffn_norm": "pre_feedforward_layernorm"}
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_PARTS_OF = {
    "gpt-oss": {**_PARTS, "ffn_gate_inp": "mlp.router"},
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "llama": {**_PARTS, **_MIXTRAL},
    "phi3": {**_PARTS, "ffn_up": "mlp.gate_up_proj"},
}
"""Names by architecture, where they differ from _PARTS."""
_PAIRED_ARCHITECTURES = ("llama", "granite")
_HEADS = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where the values of a checkpoint's tensor are, and what llama.cpp's converter did to them."""

    name: str
    """In the Hugging Face checkpoint."""
    tensor: GgufTensor
    expert: int | None = None
    """Its index in a tensor of all experts; None: the whole tensor."""
    paired_heads: int = 0
    """Heads whose rows i and i + D / 2 are side by side, as llama.cpp rotates them; 0: none."""
    is_offset: bool = False
    """Whether 1 was added."""
    second: GgufTensor | None = None
    """The other part of a joined tensor."""
    layout: Layout | None = None
    """How it is joined or turned; None: it is as it is stored."""


def sources(metadata: Metadata, num_layers: int) -> list[Source]:
    """Returns the tensors of the checkpoint.

    Args:
        metadata: of the file.
        num_layers: blocks after these are draft layers, and left out.

    Raises:
        GgufError: a tensor is not one of this architecture.
    """
    return [
        source
        for tensor in metadata.model.tensors.values()
        for source in _sources_of(tensor, metadata, num_layers)
    ]


def _sources_of(tensor: GgufTensor, metadata: Metadata, num_layers: int) -> Iterator[Source]:
    if tensor.name in _OF_CONFIG:
        return
    architecture = metadata.architecture
    is_offset = architecture.startswith("gemma") and tensor.name.endswith("_norm.weight")
    if tensor.name in _TOP:
        yield Source(name=_TOP[tensor.name], tensor=tensor, is_offset=is_offset)
        return
    match = _BLOCK.fullmatch(tensor.name)
    if match is not None and int(match["layer"]) >= num_layers:
        return
    part = match["part"] if match is not None else ""
    joins = JOINS.get(architecture, {})
    if match is not None and part in joins:
        yield _joined(tensor, joins[part], metadata)
        return
    if part in [join.second for join in joins.values()]:
        return
    name = _PARTS_OF.get(architecture, _PARTS).get(part)
    if match is None or name is None:
        raise GgufError(
            f"{tensor.file}: tensor {tensor.name} is unknown in architecture {architecture}"
        )
    ending = "" if name.endswith((_CORRECTION, _SINKS)) else f".{match['kind']}"
    name = f"model.layers.{match['layer']}.{name}{ending}"
    if "{}" in name:
        yield from _of_experts(name, tensor)
        return
    heads = _paired_heads(tensor, part, metadata)
    yield Source(name=name, tensor=tensor, paired_heads=heads, is_offset=is_offset)


def _joined(tensor: GgufTensor, join: Join, metadata: Metadata) -> Source:
    _, layer, part, kind = tensor.name.split(".")
    others = metadata.model.tensors
    second = None if join.second is None else others.get(tensor.name.replace(part, join.second))
    is_matrix = kind == "weight"
    shapes = [each.shape for each in (tensor, second) if each is not None]
    if len(shapes) < (1 if join.second is None else 2) or any(
        len(shape) != (3 if is_matrix else 2) for shape in shapes
    ):
        raise GgufError(f"{tensor.file}: {tensor.name} and {join.second} have shapes {shapes}")
    if join.layout == "gate_up" and shapes[0] != shapes[1]:
        raise GgufError(f"{tensor.file}: {tensor.name} and {join.second} have shapes {shapes}")
    if join.layout == "key_value_heads" and (
        shapes[0][0] != shapes[1][0] or shapes[0][1] != shapes[1][2]
    ):
        raise GgufError(f"{tensor.file}: {tensor.name} and {join.second} have shapes {shapes}")
    name = f"model.layers.{layer}.{join.stored_name(kind)}"
    return Source(name=name, tensor=tensor, second=second, layout=join.layout)


def _of_experts(name: str, tensor: GgufTensor) -> Iterator[Source]:
    """Yields the matrices of a tensor of all experts."""
    if len(tensor.shape) != 3:
        raise GgufError(f"{tensor.file}: tensor {tensor.name} has {len(tensor.shape)} dimensions")
    for expert in range(tensor.shape[0]):
        yield Source(name=name.format(expert), tensor=tensor, expert=expert)


def _paired_heads(tensor: GgufTensor, part: str, metadata: Metadata) -> int:
    """Returns how many heads have rows in pairs; 0: none."""
    if metadata.architecture not in _PAIRED_ARCHITECTURES or part not in _HEADS:
        return 0
    heads = metadata.size(_HEADS[part], metadata.count("attention.head_count"))
    # A vector's only dimension is that of rows; blocks of a type would cross them.
    is_split = len(tensor.shape) == 1 and tensor.type.block_size > 1
    if is_split or tensor.shape[0] % (2 * heads):
        raise GgufError(f"{tensor.file}: rows of {tensor.name} are not those of {heads} heads")
    return heads
