"""The decoder-only transformer around its attention: the shared part of all model files."""

import copy
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import ClassVar, TypeVar, cast

import torch
from torch import nn

from models.compile_support import support_torch_compile
from models.config import ModelConfig
from models.kv_cache import CacheSpec
from models.layers.drafting import DraftingModel
from models.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from models.layers.gated_mlp import GatedMLP
from models.layers.image_rows import ImageRows
from models.layers.linear import RowParallelLinear
from models.layers.moe import optional_feed_forward
from models.layers.norm import RMSNorm
from models.layers.pipeline import PPMissingLayer, make_layers
from models.layers.pooling import PoolingHead
from models.layers.rotary import RotaryEmbedding, Rotation
from models.layers.self_attention import SelfAttention
from models.layers.vision_tower import VisionTower
from models.layers.weight import ExpertTensor, WeightFormat
from models.parallel.group import SINGLE, WHOLE_MODEL, ParallelGroup, PipelineStage

_Module = TypeVar("_Module", bound=nn.Module)


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each after a norm and added to the residual stream.

    Both outputs are scaled before they are added if the config says so.

    self_attn, attention or another mixer, maps ([T, hidden], Rotation) to [T, hidden]; mlp [T,
    hidden] to [T, hidden].
    """

    def __init__(self, config: ModelConfig, self_attn: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.mlp = mlp
        size, eps, offset = config.hidden_size, config.rms_norm_eps, config.norm_offset
        self.input_layernorm = RMSNorm(size, eps, offset=offset)
        self.post_attention_layernorm = RMSNorm(size, eps, offset=offset)
        self._scale = config.multipliers.residual

    def forward(self, hidden: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Maps the residual stream, [T, hidden], to the one with both outputs added."""
        hidden = hidden + self._scaled(self.self_attn(self.input_layernorm(hidden), rotation))
        return hidden + self._scaled(self.mlp(self.post_attention_layernorm(hidden)))

    def _scaled(self, output: torch.Tensor) -> torch.Tensor:
        return output if self._scale == 1.0 else output * self._scale

    def expected_passes(self) -> Collection[str]:
        """Returns the compiler passes that must match something between the sub-layers."""
        is_scaled = self._scale != 1.0
        o_proj = cast("RowParallelLinear", self.self_attn.o_proj)
        if o_proj.is_summed and not is_scaled:
            return {"all_reduce_norm"}
        if is_scaled or not o_proj.is_one_product:
            return {"residual_norm"}
        if o_proj.method.packing is not None:
            # Products of FP8 weights take the norm instead.
            mlp_is_packed = isinstance(self.mlp, GatedMLP) and self.mlp.has_packed_gate
            return {"residual_norm", "packed_residual"} if mlp_is_packed else {"residual_norm"}
        is_dense = isinstance(self.mlp, GatedMLP) and not self.mlp.has_packed_weights
        return {"linear_residual", "norm_linear"} if is_dense else {"linear_residual"}


class Decoder(nn.Module):
    """Embedding, layers and the last norm, or a pipeline stage's share of them.

    A layer maps ([T, hidden], Rotation) to [T, hidden] and has its attention as self_attn.
    """

    def __init__(
        self, config: ModelConfig, layers: Sequence[nn.Module], group: ParallelGroup
    ) -> None:
        super().__init__()
        stage = group.stage
        self._embeds = stage.is_first
        # A tied head needs the embedding, too.
        has_embedding = stage.is_first or (stage.is_last and config.tie_word_embeddings)
        # The casts: no module of another stage is asked for more than its first input.
        self.embed_tokens = (
            VocabParallelEmbedding(config.vocab_size, config.hidden_size, group=group)
            if has_embedding
            else cast("VocabParallelEmbedding", PPMissingLayer())
        )
        # Rounded as transformers rounds it.
        scale = torch.tensor(config.multipliers.embedding, device="cpu")
        self._embedding_scale = scale.item()
        max_positions, local_rope = config.max_position_embeddings, config.local_rope
        self.rotary = RotaryEmbedding(config.head_dim, max_positions, config.rope)
        self.local_rotary = None
        if local_rope is not None:
            local_dim = config.local_heads.head_dim if config.local_heads else config.head_dim
            self.local_rotary = RotaryEmbedding(local_dim, max_positions, local_rope)
        self._has_window = tuple(window is not None for window in config.sliding_windows)
        self._num_layers = len(layers)
        vision = config.vision
        self.image_rows = None if vision is None else ImageRows(0)
        for level, layer in enumerate(layers[: vision.num_levels if vision else 0], start=1):
            if not isinstance(layer, PPMissingLayer):
                layer.add_module("image_rows", ImageRows(level))
        self.layers = nn.ModuleList(layers)
        """The layers, then draft layers if the loader appended some."""
        self.norm: nn.Module = (
            RMSNorm(config.hidden_size, config.rms_norm_eps, offset=config.norm_offset)
            if stage.is_last
            else PPMissingLayer()
        )
        self.aux_layers: tuple[int, ...] = ()
        """Layers whose outputs follow the decoder's own, for a head that guesses from them."""

    def with_layers(self, indices: Sequence[int]) -> "Decoder":
        """Returns a decoder of some of this stage's layers; it shares all modules."""
        numbers = [self._own_numbers[index] for index in indices]
        layers = nn.ModuleList(self.layers[number] for number in numbers)
        decoder = _replaced(self, layers=layers)
        decoder._num_layers = len(layers)
        decoder._has_window = tuple(self._has_window[number] for number in numbers)
        return decoder

    @property
    def own_layers(self) -> list[nn.Module]:
        """This stage's layers, without draft layers."""
        return [self.layers[number] for number in self._own_numbers]

    @property
    def _own_numbers(self) -> list[int]:
        """The numbers of this stage's layers in the model."""
        layers = islice(self.layers, self._num_layers)
        return [
            number for number, layer in enumerate(layers) if not isinstance(layer, PPMissingLayer)
        ]

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Maps [T] token ids at [T] positions to [T, hidden]; n aux layers each add columns.

        A stage after the first takes hidden states [T, hidden] for token ids.
        """
        if self._embeds:
            hidden = self.embed_tokens(input_ids)
            if self._embedding_scale != 1.0:
                hidden = hidden * self._embedding_scale
            if self.image_rows is not None:
                self.image_rows(hidden)
        else:
            # Compiled layers add to the residual stream in place, and never to an input.
            hidden = input_ids.clone()
        rotation = local = self.rotary(positions)
        if self.local_rotary is not None:
            local = self.local_rotary(positions)
        outputs = {}
        tokens = self.token_inputs(input_ids, hidden)
        layers = islice(self.layers, self._num_layers)
        for index, (layer, has_window) in enumerate(zip(layers, self._has_window, strict=True)):
            inputs = () if tokens is None else (tokens[:, index],)
            hidden = layer(hidden, local if has_window else rotation, *inputs)
            if (image_rows := getattr(layer, "image_rows", None)) is not None:
                image_rows(hidden)
            if index in self.aux_layers:
                outputs[index] = hidden
        normed: torch.Tensor = self.norm(hidden)
        if not self.aux_layers:
            return normed
        return torch.cat((normed, *(outputs[index] for index in self.aux_layers)), dim=-1)

    def token_inputs(self, token_ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor | None:
        """Returns what each layer gets of each token besides the rotation, [T, layers, n], or None.

        embedded: [T, hidden], the tokens' vectors.
        """
        del token_ids, embedded
        return None

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

    Must run inside `models.forward_context.forward_context`. Model files subclass it and make their
    layers.
    """

    packed_modules_mapping: ClassVar[dict[str, tuple[str, ...]]] = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }
    """Our module name -> the checkpoint's modules packed into it, in order of shard id."""
    weights_mapping: ClassVar[dict[str, str]] = {}
    """Replacements of parts of the checkpoint's tensor names, done first."""

    unused_parts: ClassVar[tuple[str, ...]] = ()
    """Beginnings of names, after these replacements, of parts that are passed over."""

    decoder_class: ClassVar[type[Decoder]] = Decoder

    stage: PipelineStage = WHOLE_MODEL
    """The layers that this process holds."""

    expert_names: ClassVar[tuple[str, str, str] | None] = ("gate_proj", "up_proj", "down_proj")
    """The checkpoint's names of an expert's gate, up and down; None: each stacks all experts."""

    transposes_stacked_experts: ClassVar[bool] = False
    """Whether a checkpoint that stacks all experts has their rows and columns exchanged."""

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

    has_head_norms: ClassVar[bool] = False
    """Whether `make_mixer` gives attention a norm for each query and key head."""

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, group: ParallelGroup) -> nn.Module:
        """Returns the layer of a number; families redefine it, or a part of it."""
        mixer = cls.make_mixer(config, index, group)
        return DecoderLayer(config, mixer, cls.make_feed_forward(config, index, group))

    @classmethod
    def make_mixer(cls, config: ModelConfig, index: int, group: ParallelGroup) -> nn.Module:
        """Returns the attention of the layer of a number."""
        return SelfAttention(config, index, group, has_head_norms=cls.has_head_norms)

    @classmethod
    def make_feed_forward(cls, config: ModelConfig, index: int, group: ParallelGroup) -> nn.Module:
        """Returns the feed-forward part of the layer of a number, with experts if it has some."""
        return optional_feed_forward(config, index, group)

    def __init__(self, config: ModelConfig, group: ParallelGroup = SINGLE) -> None:
        super().__init__()
        self.config = config
        self.weight_formats: tuple[WeightFormat, ...] = ()
        """Filled by the loader."""
        self.stage = group.stage
        self._dtype = torch.get_default_dtype()
        layers = make_layers(config, group, lambda index: self.make_layer(config, index, group))
        self.model = self.decoder_class(config, layers, group)
        self.lm_head = (
            ParallelLMHead(
                config.vocab_size,
                config.hidden_size,
                group=group,
                scale=config.multipliers.logits,
                soft_cap=config.multipliers.logits_cap,
            )
            if self.stage.is_last
            else cast("ParallelLMHead", PPMissingLayer())
        )
        self.visual: VisionTower | None = None
        """The encoder of images, if `config` has one; no part of the trace. Set by the loader."""
        self.pooling: PoolingHead | None = None
        """Makes vectors of hidden states; None of a model that generates. Set by the loader."""
        self.draft_models: tuple[DraftingModel, ...] = ()
        """Models that guess tokens for this one; no part of its trace and its weights."""
        self.num_adapter_slots = self.max_adapter_rank = 0
        """Adapters for which layers have room, and their largest rank; see `adapter_room`."""
        if config.tie_word_embeddings and self.stage.is_last:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Maps [T] int32 or int64 token ids at [T] int64 positions to [T, hidden].

        A pipeline stage after the first takes the hidden states [T, hidden] of the one before.
        """
        hidden: torch.Tensor = self.model(input_ids, positions)
        return hidden

    def expected_passes(self) -> Collection[str]:
        """Returns the compiler passes that must match something in the model.

        Adapters come between products and what passes put them together with.
        """
        return () if self.num_adapter_slots else self.model.expected_passes()

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the hidden states."""
        return self._dtype

    @property
    def stored_module(self) -> nn.Module:
        """The module whose parameters have the names of a checkpoint."""
        return self

    @property
    def tied_weights(self) -> Mapping[str, str]:
        """Tensor of a checkpoint that repeats another -> the other."""
        ties = self.config.tie_word_embeddings and self.stage.is_last
        return {"lm_head.weight": "model.embed_tokens.weight"} if ties else {}

    @property
    def expert_tensors(self) -> Sequence[ExpertTensor]:
        """Where the tensors of single experts go."""
        return self.expert_mapping(self.config)

    @property
    def num_loaded_layers(self) -> int:
        """The number of layers, draft layers included if they are loaded."""
        return len(self.model.layers)

    def renamed(self, name: str) -> str:
        """Returns a stored tensor's name in the model's family."""
        for stored, ours in self.weights_mapping.items():
            name = name.replace(stored, ours)
        return name

    def make_draft_layer(self, layer_index: int, group: ParallelGroup) -> nn.Module | None:
        """Returns the draft layer of a number, if it is not as the model's layers."""
        return None

    def is_unused(self, name: str) -> bool:
        """Returns whether a stored tensor repeats another part of the model, or is of none."""
        repeats = name in self.tied_weights or name.endswith("rotary_emb.inv_freq")
        return repeats or name.startswith(self.unused_parts)

    def cache_specs(self) -> list[CacheSpec]:
        """Returns the cache entries of this stage's layers, draft layers last.

        In a layer with several, they are in the order of its modules.
        """
        specs = (getattr(module, "cache_spec", None) for module in self.model.layers.modules())
        return [spec for spec in specs if spec is not None]

    @property
    def output_size(self) -> int:
        """Elements of a token's output: its hidden state, then those of aux layers."""
        return self.config.hidden_size + len(self.model.aux_layers) * self.config.stream_size

    @property
    def decoder_layers(self) -> list[nn.Module]:
        """This stage's layers, without draft layers."""
        return self.model.own_layers

    def with_layers(self, indices: Sequence[int]) -> "CausalLM":
        """Returns a model of some of the layers; it shares all modules."""
        return _replaced(self, model=self.model.with_layers(indices))

    def compute_logits(
        self, hidden: torch.Tensor, adapter_slots: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Maps [S, hidden] to [S, vocab], of the hidden states' dtype.

        Outputs of aux layers may follow each state. adapter_slots: [at least S], the slot of each
        state's adapter, as in the forward context; None computes the model's own logits.
        """
        return self.lm_head.gathered(self.local_logits(hidden, adapter_slots))

    def local_logits(
        self, hidden: torch.Tensor, adapter_slots: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Maps [S, hidden] to the logits of this rank's tokens; see `compute_logits`."""
        if self.model.aux_layers:
            hidden = hidden[:, : self.config.hidden_size].contiguous()
        logits: torch.Tensor = self.lm_head(hidden, adapter_slots)
        return logits


def _replaced(module: _Module, **submodules: nn.Module) -> _Module:
    """Returns a copy of a module that shares everything but some submodules."""
    copied = copy.copy(module)
    copied._modules = {**module._modules, **submodules}
    return copied
