"""The least time that a step of a model can take: its reads and products, once each.

Weights count as they are stored, and only the experts that a batch uses count. Reads are
taken at 4,482 GB/s and products at 734 TFLOP/s, as measured on an H200 in bfloat16; where weights
are FP8 the arithmetic of long steps is up to twice as fast, which this leaves out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from models.config import ModelConfig
from models.config_sections.compression import CompressionConfig
from models.config_sections.mixers import STATE
from models.kv_cache import KVCacheSpec, LatentCacheSpec, RowCacheSpec
from models.layers.decoder import CausalLM
from models.layers.experts import Experts
from models.layers.quantization import QuantizableLinear
from models.loading.stored_formats import keep_stored_formats
from models.registry import model_class
from models.state_cache import StateSpec

BYTES_PER_MS = 4482e6
FLOP_PER_MS = 734e9
MEASURED_ON = "H200"
"""Part of the name of the GPU that the two figures are of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFloor:
    """Bytes that the steps of one model read, and its products.

    dense_bytes: weights that every step reads. expert_bytes: all experts of all layers.
    dense_params, expert_params: the number of parameters; the head is counted apart, as only
    sampled tokens go through it. num_experts, top_k: of each layer; 1 and 1 without experts.
    cached: for each layer bytes per token and how many tokens a query sees at most.
    state_bytes: states of a request, which a step reads and writes.
    pair_flop: arithmetic of one layer's attention for one query and one key that it sees.
    """

    dense_bytes: float
    expert_bytes: float
    dense_params: float
    expert_params: float
    head_params: float
    num_experts: int
    top_k: int
    cached: Sequence[tuple[float, int | None]]
    pair_flop: float
    state_bytes: float = 0.0

    def weight_bytes(self, num_tokens: int) -> float:
        """Returns the weights that a step reads if tokens choose experts evenly.

        An expert is left out by one token with probability 1 - k / E, by all with its power.
        """
        touched = 1 - (1 - self.top_k / self.num_experts) ** num_tokens
        return self.dense_bytes + touched * self.expert_bytes

    def token_flop(self, num_tokens: int, num_sampled: int) -> float:
        """Returns the products of a step; only tokens that are sampled from go through the head."""
        active = self.dense_params + self.expert_params * self.top_k / self.num_experts
        return 2 * (num_tokens * active + num_sampled * self.head_params)

    def cache_bytes(self, context: int) -> float:
        """Returns the bytes of keys and values that one query reads, its own among them."""
        return sum(size * min(context, window or context) for size, window in self.cached)

    def prompt_attention_flop(self, num_tokens: int) -> float:
        """Returns the arithmetic of a prompt's attention, each query with the keys it sees."""
        pairs = 0
        for _, window in self.cached:
            seen = min(num_tokens, window or num_tokens)
            pairs += seen * (seen + 1) // 2 + (num_tokens - seen) * seen
        return pairs * self.pair_flop

    def decode_ms(self, batch: int, context: int) -> float:
        """Returns the floor of a step of one token for each sequence of `context` tokens."""
        of_request = self.cache_bytes(context) + 2 * self.state_bytes
        num_bytes = self.weight_bytes(batch) + batch * of_request
        return max(num_bytes / BYTES_PER_MS, self.token_flop(batch, batch) / FLOP_PER_MS)

    def prefill_ms(self, num_tokens: int) -> float:
        """Returns the floor of one prompt's step, attention's own arithmetic left out."""
        flop = self.token_flop(num_tokens, 0)
        return max(self.weight_bytes(num_tokens) / BYTES_PER_MS, flop / FLOP_PER_MS)


def step_floor(config: ModelConfig, cache_dtype: torch.dtype) -> StepFloor:
    """Returns the floor of a model's steps on one GPU.

    Args:
        config: the model's.
        cache_dtype: of the KV cache.
    """
    with torch.device("meta"), torch.no_grad():
        previous = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, config.dtype))
        try:
            model = model_class(config.architecture)(config)
        finally:
            torch.set_default_dtype(previous)
    if config.quantization is not None:
        keep_stored_formats(model, None, {})
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    of_experts = {id(param) for module in experts for param in module.parameters()}
    dense = [param for param in model.parameters() if id(param) not in of_experts]
    per_byte = {
        id(layer.weight): layer.method.packing.per_byte
        for layer in model.modules()
        if isinstance(layer, QuantizableLinear) and layer.method.packing is not None
    }
    head, embedding = model.lm_head.weight, model.model.embed_tokens.weight
    # A step reads a few rows of an embedding, unless that is the head.
    unread = 0 if head is embedding else embedding.nbytes
    expert_params = sum(
        3 * len(each.down_proj) * each.gate_up_proj.shape[1] // 2 * config.hidden_size
        for each in experts
    )
    dense_params = sum(
        param.numel() * per_byte.get(id(param), 1)
        for name, param in model.named_parameters()
        if id(param) not in of_experts and not name.endswith("_scale")
    )
    dense_params -= head.numel() if head is embedding else head.numel() + embedding.numel()
    return StepFloor(
        dense_bytes=sum(param.nbytes for param in dense) - unread,
        expert_bytes=sum(param.nbytes for each in experts for param in each.parameters()),
        dense_params=dense_params,
        expert_params=expert_params,
        head_params=head.numel(),
        num_experts=config.moe.num_experts if config.moe else 1,
        top_k=config.moe.num_experts_per_tok if config.moe else 1,
        cached=_cached(config, model, cache_dtype),
        pair_flop=2 * config.num_attention_heads * _pair_elements(config),
        state_bytes=sum(
            spec.num_bytes for spec in model.cache_specs() if isinstance(spec, StateSpec)
        ),
    )


def _cached(
    config: ModelConfig, model: CausalLM, dtype: torch.dtype
) -> list[tuple[float, int | None]]:
    """Returns the bytes per token and the window of each entry that keeps tokens."""
    if config.compression is not None:
        return _compressed(config.compression, config.num_hidden_layers, dtype)
    cached: list[tuple[float, int | None]] = []
    for spec, window in zip(model.cache_specs(), config.cache_windows, strict=True):
        if isinstance(spec, StateSpec) or window == STATE:
            continue
        assert not isinstance(spec, RowCacheSpec), "rows have sizes of their own"
        num_bytes = float(spec.bytes_per_token(dtype))
        if isinstance(spec, LatentCacheSpec) and spec.index_dim and config.mla and config.mla.index:
            # All keys of the index are read, and of the rest what it chooses.
            of_index = num_bytes - replace(spec, index_dim=0).bytes_per_token(dtype)
            cached += [(of_index, None), (num_bytes - of_index, config.mla.index.top_k)]
        elif isinstance(spec, KVCacheSpec) and spec.index_dim and config.block_index:
            index = config.block_index
            of_index = num_bytes - replace(spec, index_dim=0).bytes_per_token(dtype)
            chosen = index.top_blocks * index.block_size
            cached += [(of_index, None), (num_bytes - of_index, chosen)]
        else:
            cached.append((num_bytes, window))
    return cached


def _compressed(
    sizes: CompressionConfig, num_layers: int, dtype: torch.dtype
) -> list[tuple[float, int | None]]:
    """Returns the same of compressed keys: a key serves as many tokens as its entry has."""
    cached: list[tuple[float, int | None]] = []
    for layer in range(num_layers):
        own, key_bytes = sizes.layers.get(layer), sizes.head_dim * dtype.itemsize
        cached.append((float(key_bytes), sizes.window))
        if own is None:
            continue
        cached.append(
            (key_bytes / own.rate, sizes.index.top_k * own.rate if own.overlaps else None)
        )
        if own.overlaps:
            cached.append((sizes.index.head_dim * dtype.itemsize / own.rate, None))
    return cached


def _pair_elements(config: ModelConfig) -> int:
    """Returns the length of a head's key and value together, with which a query is multiplied."""
    if config.mla is None:
        return 2 * config.head_dim
    return config.mla.qk_nope_head_dim + config.mla.qk_rope_head_dim + config.mla.v_head_dim
