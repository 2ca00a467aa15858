"""Reads a checkpoint's config.json into the one object that model code is built from. No torch."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from models.config_sections import windows
from models.config_sections.aliases import with_common_names
from models.config_sections.block_index import BlockIndexConfig, read_block_index
from models.config_sections.compression import CompressionConfig, read_compression
from models.config_sections.families import (
    DRAFTING_ARCHITECTURES,
    FAMILIES_WITH_NORMS_FROM_ONE,
    OWN_ARCHITECTURES,
)
from models.config_sections.family_defaults import FAMILY_DEFAULTS
from models.config_sections.fields import ConfigError as ConfigError
from models.config_sections.fields import Fields
from models.config_sections.gemma4 import Gemma4Config, read_gemma4
from models.config_sections.head_sizes import HeadSizes
from models.config_sections.heads import (
    ValueConfig,
    has_output_bias,
    read_head_dim,
    read_heads,
    read_values,
)
from models.config_sections.hyper_connections import HyperConfig, read_hyper_connections
from models.config_sections.layer_types import count_draft_layers, count_layers
from models.config_sections.mixers import (
    ATTENTION,
    COMPRESSED,
    RECENT,
    SHARED,
    STATE,
    Part,
    Window,
    cache_entries,
    read_mixers,
)
from models.config_sections.mla import MlaConfig, read_mla
from models.config_sections.moe import MoeConfig, read_inner_size, read_moe
from models.config_sections.mrope import read_axes
from models.config_sections.multipliers import Multipliers, read_multipliers
from models.config_sections.recurrence import (
    DeltaNetConfig,
    Mamba2Config,
    ShortConvConfig,
    read_delta_net,
    read_mamba2,
    read_short_conv,
)
from models.config_sections.rope import RopeConfig, read_ropes
from models.config_sections.text_part import is_wrapper, text_part, with_decoder_class
from models.config_sections.towers import read_vision
from models.config_sections.unsupported import refuse_unsupported
from models.config_sections.vision import VisionConfig
from models.quantization.config import QuantizationConfig
from models.quantization.read import quantization_of

CONFIG_FILE = "config.json"
DTYPES = ("float32", "bfloat16", "float16")
ModelImpl = Literal["auto", "octavo", "transformers"]
"""Whose modules run: ours, transformers', or ours where there are some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersConfig:
    """Facts besides its sizes that a model of transformers' modules depends on.

    version: of transformers. config_sha256: of the content of config.json, hexadecimal.
    """

    version: str
    config_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder-only model, with the names that Hugging Face checkpoints use."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    """Size of one head; with latent or compressed attention, of its rotated part."""
    rms_norm_eps: float
    rope: RopeConfig
    local_rope: RopeConfig | None
    """Of layers with a window, if it is another."""
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    """Of the projections to queries, keys and values."""
    attention_output_bias: bool
    mlp_bias: bool
    use_qk_norm: bool
    """Whether each head is normalised before it is rotated, in families with both variants."""
    sliding_windows: tuple[int | None, ...]
    """For each layer the keys that a query sees, as `Window` says; None means all."""
    hidden_act: str
    """Activation of the feed-forward gate: silu or gelu_pytorch_tanh."""
    norm_offset: float
    """Added to the stored weights of norms."""
    multipliers: Multipliers
    dtype: str
    """Dtype of the stored weights, one of DTYPES."""
    eos_token_ids: tuple[int, ...]
    moe: MoeConfig | None = None
    mla: MlaConfig | None = None
    quantization: QuantizationConfig | None = None
    """The format of stored weights, if not `dtype`."""
    num_draft_layers: int = 0
    """Layers after the last one that guess tokens ahead; only speculative decoding loads them."""
    draft_window: int | None = None
    """The keys that a query of draft layers sees, as `sliding_windows`; None means all."""
    unrotated_layers: tuple[int, ...] = ()
    """Layers whose queries and keys have no positions."""
    mixers: tuple[str, ...] = ()
    """Kind of each layer's token mixer: attention, state, both or none; empty: all attention."""
    delta_net: DeltaNetConfig | None = None
    mamba2: Mamba2Config | None = None
    short_conv: ShortConvConfig | None = None
    gemma4: Gemma4Config | None = None
    local_heads: HeadSizes | None = None
    """Heads of layers with a window, if they are others."""
    compression: CompressionConfig | None = None
    hyper: HyperConfig | None = None
    values: ValueConfig | None = None
    """Values, if they are shorter than keys."""
    block_index: BlockIndexConfig | None = None
    is_text_part: bool = False
    """Whether the checkpoint has other parts, too, which are passed over."""

    sees_later: bool = False
    """Whether queries of a model of vectors see later tokens, too, in windows as far as earlier."""

    lacks_head: bool = False
    """Whether no head that chooses tokens is loaded, even if the checkpoint has one."""

    vision: VisionConfig | None = None
    """The encoder of images; None if the model sees none, or is read for text alone."""

    transformers: TransformersConfig | None = None
    """Set if transformers' modules run; their own configuration then has what is neutral here."""

    @classmethod
    def from_folder(cls, folder: Path, *, sees_images: bool = False) -> "ModelConfig":
        """Reads and checks `folder`/config.json.

        Args:
            folder: the checkpoint.
            sees_images: whether the encoder of images is read, if there is one.

        Raises:
            ConfigError: the file is missing or not JSON, a field is missing or ill-typed, or the
                model needs an unsupported feature. Names the file, field and value.
        """
        whole = Fields.read(folder / CONFIG_FILE)
        stored = with_common_names(text_part(whole))
        defaults = FAMILY_DEFAULTS.get(stored.architecture(), {})
        # Null means that there is none.
        given = {"sliding_window", "attention_chunk_size"} & stored.values.keys()
        defaults = {name: each for name, each in defaults.items() if name not in given}
        fields = stored.with_defaults(defaults)
        refuse_unsupported(fields)
        is_gemma = fields.architecture().startswith("Gemma")
        gemma4 = read_gemma4(fields, count_layers(fields))
        adds_one = (
            is_gemma and gemma4 is None
        ) or fields.architecture() in FAMILIES_WITH_NORMS_FROM_ONE
        hidden_size = fields.count("hidden_size")
        num_heads = fields.count("num_attention_heads")
        num_kv_heads = fields.count("num_key_value_heads", num_heads)
        num_layers = count_layers(fields)
        max_positions = fields.count("max_position_embeddings")
        mla = read_mla(fields, num_layers)
        compression = read_compression(fields, num_layers)
        if compression is not None:
            head_dim = compression.rope_dim
        else:
            head_dim = (
                mla.qk_rope_head_dim if mla else read_head_dim(fields, hidden_size, num_heads)
            )
        heads, local_heads = read_heads(fields, head_dim, num_heads, num_kv_heads)
        head_dim = heads.head_dim
        rope, local_rope = read_ropes(fields, max_positions, head_dim)
        vision = read_vision(whole, stored) if sees_images else None
        if vision is not None:
            num_pairs = int(head_dim * rope.partial_rotary_factor) // 2
            rope = replace(rope, axes=read_axes(whole, fields, num_pairs))
        spans = windows.read_sliding_windows(fields, num_layers)
        return cls(
            architecture=fields.architecture(),
            vocab_size=fields.count("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=read_inner_size(fields),
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=heads.num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=fields.number("rms_norm_eps"),
            rope=rope,
            local_rope=local_rope,
            max_position_embeddings=max_positions,
            tie_word_embeddings=fields.flag("tie_word_embeddings"),
            # InternLM3 has qkv_bias for the inner projections and bias for all others.
            attention_bias=any(
                fields.flag(name) for name in ("attention_bias", "qkv_bias", "use_bias")
            ),
            attention_output_bias=has_output_bias(fields),
            mlp_bias=any(fields.flag(name) for name in ("mlp_bias", "bias", "use_bias")),
            use_qk_norm=fields.flag("use_qk_norm"),
            sliding_windows=spans,
            unrotated_layers=windows.read_unrotated_layers(fields, spans),
            hidden_act="gelu_pytorch_tanh" if is_gemma else "silu",
            norm_offset=1.0 if adds_one else 0.0,
            multipliers=read_multipliers(stored),
            dtype=read_dtype(fields),
            eos_token_ids=fields.token_ids("eos_token_id"),
            moe=read_moe(fields, num_layers),
            mla=mla,
            quantization=quantization_of(fields),
            num_draft_layers=count_draft_layers(fields),
            draft_window=windows.read_draft_window(fields),
            mixers=read_mixers(fields, num_layers),
            delta_net=read_delta_net(fields),
            mamba2=read_mamba2(fields),
            short_conv=read_short_conv(fields),
            gemma4=gemma4,
            compression=compression,
            hyper=read_hyper_connections(fields),
            local_heads=local_heads,
            values=read_values(fields, head_dim),
            block_index=read_block_index(fields, num_layers, heads),
            is_text_part=is_wrapper(whole),
            lacks_head=with_decoder_class(whole) is not whole,
            vision=vision,
            sees_later=windows.sees_later(fields),
        )

    @property
    def max_whole_tokens(self) -> int:
        """Most tokens of an image that one step computes; 0 where chunks may end inside of one."""
        return 0 if self.vision is None else self.vision.max_whole_tokens

    def without_head(self) -> "ModelConfig":
        """Returns the config of the same model without the head that chooses tokens."""
        # A tied head has no weights of its own.
        return replace(self, tie_word_embeddings=True, lacks_head=True)

    def with_longest(self, num_tokens: int) -> "ModelConfig":
        """Returns the config of a model whose sequences have at most `num_tokens`."""
        return replace(self, rope=replace(self.rope, longest=num_tokens))

    def sliding_window(self, layer_index: int) -> int | None:
        """Returns a layer's window in tokens; None if it sees all, as most draft layers do."""
        is_draft = layer_index >= self.num_hidden_layers
        return self.draft_window if is_draft else self.sliding_windows[layer_index]

    def mixer(self, layer_index: int) -> str:
        """Returns the kind of a layer's token mixer; draft layers have attention."""
        return self.mixers[layer_index] if layer_index < len(self.mixers) else ATTENTION

    def cache_index(self, layer_index: int, part: Part = ATTENTION) -> int:
        """Returns the number of a layer's cache entry among all of the model, in layer order.

        Attention comes before the state of the same layer. Draft layers follow, an entry each.
        """
        entries = cache_entries(self.mixers, self.num_hidden_layers)
        if layer_index >= self.num_hidden_layers:
            return len(entries) + layer_index - self.num_hidden_layers
        if self.mixer(layer_index) == SHARED:
            layer_index = self._sharing_source(layer_index)
        return entries.index((layer_index, part))

    def _sharing_source(self, layer_index: int) -> int:
        """Returns the layer whose cache a layer shares: the last one of its kind with a cache."""
        return max(
            layer
            for layer, window in enumerate(self.sliding_windows)
            if window == self.sliding_windows[layer_index] and self.mixer(layer) != SHARED
        )

    def heads_of(self, layer_index: int) -> HeadSizes:
        """Returns the sizes of a layer's heads."""
        if self.local_heads is not None and self.sliding_window(layer_index) is not None:
            return self.local_heads
        return HeadSizes(head_dim=self.head_dim, num_kv_heads=self.num_key_value_heads)

    def rope_of(self, layer_index: int) -> RopeConfig:
        """Returns the rotary positions of a layer."""
        is_local = self.local_rope is not None and self.sliding_window(layer_index) is not None
        return self.local_rope if self.local_rope and is_local else self.rope

    @property
    def cache_windows(self) -> tuple[Window, ...]:
        """The window of each cache entry."""
        entries = cache_entries(self.mixers, self.num_hidden_layers)
        return tuple(self._window(layer, part) for layer, part in entries)

    def _window(self, layer: int, part: Part) -> Window:
        window = self.sliding_window(layer)
        if self.compression is not None and (part == RECENT or window is not None):
            return self.compression.recent_window
        return STATE if part == STATE else window

    @property
    def cache_spans(self) -> tuple[int, ...]:
        """The blocks of others that have as many tokens as one of each cache entry."""
        entries = cache_entries(self.mixers, self.num_hidden_layers)
        span = 1 if self.compression is None else self.compression.block_span
        return tuple(
            span if part == ATTENTION and self.mixer(layer) == COMPRESSED else 1
            for layer, part in entries
        )

    @property
    def stream_size(self) -> int:
        """Elements of a token between two layers: its residual streams."""
        return self.hidden_size * (1 if self.hyper is None else self.hyper.num_streams)

    def entry_windows(self, *, with_draft_layers: bool) -> tuple[Window, ...]:
        """Returns the window of each cache entry; those of draft layers come last."""
        window = self._window(self.num_hidden_layers, ATTENTION)
        return self.cache_windows + (window,) * (self.num_draft_layers if with_draft_layers else 0)

    @property
    def entry_layers(self) -> tuple[int, ...]:
        """The layer of each cache entry."""
        entries = cache_entries(self.mixers, self.num_hidden_layers)
        return tuple(layer for layer, _ in entries)

    def require_head(self) -> None:
        """Raises ConfigError unless the checkpoint has a head that chooses tokens."""
        if self.lacks_head:
            raise ConfigError(
                "the checkpoint has no head that chooses tokens; serve it with --task embed, or "
                "with --task score if it has one for scores"
            )

    def require_draft_layers(self) -> None:
        """Raises ConfigError unless the model has draft layers that can be built."""
        if self.architecture not in DRAFTING_ARCHITECTURES:
            raise ConfigError(
                f"num_speculative_tokens needs the draft layers of one of "
                f"{', '.join(DRAFTING_ARCHITECTURES)}; the model is {self.architecture}"
            )
        if STATE in self.cache_windows and self.num_draft_layers > 1:
            raise ConfigError(
                f"num_speculative_tokens needs one draft layer in {self.architecture}, not "
                f"{self.num_draft_layers}"
            )
        if not self.num_draft_layers:
            raise ConfigError(
                "num_speculative_tokens needs draft layers; the model has none, for its "
                "config.json has no num_nextn_predict_layers, or layers of kinds unknown here"
            )


def decoder_class(folder: Path) -> str:
    """Reads the name of the class that runs a model, or its text part, from config.json.

    Raises:
        ConfigError: the file is missing or wrong, or no class runs the text part.
    """
    return text_part(Fields.read(folder / CONFIG_FILE)).architecture()


def runs_own_modules(architecture: str, model_impl: ModelImpl) -> bool:
    """Returns whether our modules run a model.

    Raises:
        ConfigError: ours are demanded, and there are none.
    """
    is_own = architecture in OWN_ARCHITECTURES
    if model_impl == "octavo" and not is_own:
        raise ConfigError(
            f"architecture {architecture!r} is not supported by --model-impl octavo; the supported "
            f"ones are {', '.join(OWN_ARCHITECTURES)}"
        )
    return is_own and model_impl != "transformers"


def read_dtype(fields: Fields) -> str:
    """Reads the dtype of the stored weights; float32 if absent."""
    return fields.choice("dtype" if fields.has("dtype") else "torch_dtype", DTYPES, "float32")
