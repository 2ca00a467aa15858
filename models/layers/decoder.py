"""The decoder-only transformer around its attention: the shared part of all model files."""

import copy
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from typing import ClassVar, TypeVar, cast

import torch
from torch import nn

from models.compile_support import support_torch_compile
from models.config import ModelConfig
from models.kv_cache import CacheSpec
from models.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from models.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from models.layers.norm import RMSNorm
from models.layers.rotary import RotaryEmbedding, Rotation
from models.layers.weight import ExpertTensor
from models.ops.elementwise.silu_and_mul import silu_and_mul
from models.parallel.group import ParallelGroup

_Module = TypeVar("_Module", bound=nn.Module)


class GatedMLP(nn.Module):
    """Feed-forward layer down(silu(gate(x)) * up(x))."""

    def __init__(
        self, config: ModelConfig, group: ParallelGroup, *, intermediate_size: int | None = None
    ) -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.mlp_bias
        inner = intermediate_size or config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden, [inner, inner], bias=bias, group=group
        )
        self.down_proj = RowParallelLinear(inner, hidden, bias=bias, group=group)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps [T, hidden] to [T, hidden]."""
        output: torch.Tensor = self.down_proj(silu_and_mul(self.gate_up_proj(hidden)))
        return output

    def expected_passes(self) -> Collection[str]:
        """Returns the compiler passes that must match something in the layer."""
        return {"linear_gate"}


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each after a norm and added to the residual stream.

    self_attn maps ([T, hidden], Rotation) to [T, hidden], mlp [T, hidden] to [T, hidden].
    """

    def __init__(self, config: ModelConfig, self_attn: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.mlp = mlp
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Maps the residual stream, [T, hidden], to the one with both outputs added."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation)
        output: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output

    def expected_passes(self) -> Collection[str]:
        """Returns the compiler passes that must match something between the sub-layers."""
        if not cast("RowParallelLinear", self.self_attn.o_proj).is_one_product:
            return {"residual_norm"}
        is_dense = isinstance(self.mlp, GatedMLP)
        return {"linear_residual", "norm_linear"} if is_dense else {"linear_residual"}


class Decoder(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(
        self, config: ModelConfig, layers: Sequence[DecoderLayer], group: ParallelGroup
    ) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, group=group
        )
        self.rotary = RotaryEmbedding(config.head_dim, config.max_position_embeddings, config.rope)
        self._num_layers = len(layers)
        self.layers = nn.ModuleList(layers)
        """The layers, then draft layers if the loader appended some."""
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def with_layers(self, indices: Sequence[int]) -> "Decoder":
        """Returns a decoder of some of the layers; it shares all modules."""
        layers = nn.ModuleList(self.layers[index] for index in indices)
        decoder = _replaced(self, layers=layers)
        decoder._num_layers = len(layers)
        return decoder

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Maps [T] token ids at [T] positions to [T, hidden]."""
        hidden = self.embed_tokens(input_ids)
        rotation = self.rotary(positions)
        for layer in islice(self.layers, self._num_layers):
            hidden = layer(hidden, rotation)
        normed: torch.Tensor = self.norm(hidden)
        return normed

    def expected_passes(self) -> Collection[str]:
        """Returns the compiler passes that must match something in the layers, without drafts."""
        layers = islice(self.layers, self._num_layers)
        promises = [
            promise
            for layer in layers
            for module in layer.modules()
            if (promise := getattr(module, "expected_passes", None)) is not None
        ]
        return set().union(*(promise() for promise in promises))


@support_torch_compile(dynamic_arg_dims={"input_ids": 0, "positions": 0})
class CausalLM(nn.Module):
    """A language model: a decoder and a head over its vocabulary.

    Must run inside `models.forward_context.forward_context`. Model files subclass it and pass their
    layers.
    """

    packed_modules_mapping: ClassVar[dict[str, tuple[str, ...]]] = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }
    """Our module name -> the checkpoint's modules packed into it, in order of shard id."""
    weights_mapping: ClassVar[dict[str, str]] = {}
    """Replacements of parts of the checkpoint's tensor names, done first."""

    expert_names: ClassVar[tuple[str, str, str] | None] = ("gate_proj", "up_proj", "down_proj")
    """The checkpoint's names of an expert's gate, up and down; None: each stacks all experts."""

    @classmethod
    def expert_mapping(cls, config: ModelConfig) -> Sequence[ExpertTensor]:
        """Returns where the tensors of single experts go; none of a dense model."""
        if config.moe is None or cls.expert_names is None:
            return ()
        gate, up, down = cls.expert_names
        tensors = ((gate, "gate_up_proj", 0), (up, "gate_up_proj", 1), (down, "down_proj", 0))
        return [
            ExpertTensor(f"experts.{parameter}", f"experts.{expert}.{name}.weight", expert, part)
            for expert in range(config.moe.num_experts)
            for name, parameter, part in tensors
        ]

    def __init__(
        self, config: ModelConfig, layers: Sequence[DecoderLayer], group: ParallelGroup
    ) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, layers, group)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, group=group)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Maps [T] int32 or int64 token ids at [T] int64 positions to [T, hidden]."""
        hidden: torch.Tensor = self.model(input_ids, positions)
        return hidden

    def expected_passes(self) -> Collection[str]:
        """Returns the compiler passes that must match something in the model."""
        return self.model.expected_passes()

    def cache_specs(self) -> list[CacheSpec]:
        """Returns each layer's cache entry, draft layers last."""
        layers = cast("Iterable[DecoderLayer]", self.model.layers)
        return [cast("CacheSpec", layer.self_attn.cache_spec) for layer in layers]

    @property
    def decoder_layers(self) -> list[nn.Module]:
        """The layers without draft layers."""
        return list(self.model.layers)[: self.config.num_hidden_layers]

    def with_layers(self, indices: Sequence[int]) -> "CausalLM":
        """Returns a model of some of the layers; it shares all modules."""
        return _replaced(self, model=self.model.with_layers(indices))

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps [S, hidden] to [S, vocab], of the hidden states' dtype."""
        logits: torch.Tensor = self.lm_head(hidden)
        return logits


def _replaced(module: _Module, **submodules: nn.Module) -> _Module:
    """Returns a copy of a module that shares everything but some submodules."""
    copied = copy.copy(module)
    copied._modules = {**module._modules, **submodules}
    return copied
