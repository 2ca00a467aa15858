"""Attention to compressed entries of several tokens each, in config.json."""

from collections.abc import Mapping
from dataclasses import dataclass

from models.config_sections.fields import Fields
from models.config_sections.layer_types import (
    HEAVILY_COMPRESSED,
    SPARSE_COMPRESSED,
    read_layer_types,
)
from models.config_sections.mla import IndexConfig

_DEFAULT_RATES = {SPARSE_COMPRESSED: 4, HEAVILY_COMPRESSED: 128}
_RATE_NAMES = {SPARSE_COMPRESSED: "compress_rate_csa", HEAVILY_COMPRESSED: "compress_rate_hca"}


MAX_SPAN = 16
"""Most blocks of tokens that a block of entries covers; shared prefixes are multiples of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCompression:
    """Entries that a layer caches besides recent keys.

    rate: tokens of a compressed entry. overlaps: whether an entry also has parts of the tokens of
    the one before it; then an index chooses entries.
    """

    rate: int
    overlaps: bool

    @property
    def span(self) -> int:
        """Tokens that an entry is made of."""
        return 2 * self.rate if self.overlaps else self.rate


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionConfig:
    """Sizes of attention to recent keys and to compressed ones, which are values, too."""

    head_dim: int
    """Size of a key; the last elements are rotated."""
    rope_dim: int
    q_lora_rank: int
    num_output_groups: int
    """Groups of heads that the first output projection keeps apart."""
    o_lora_rank: int
    """Outputs of that projection for each group."""
    window: int
    """Keys of single tokens that a query sees, its own included."""
    layers: Mapping[int, LayerCompression]
    """Compression of each layer that has one; others attend to recent keys alone."""
    index: IndexConfig

    def row_sizes(self, layer_index: int) -> tuple[int, int]:
        """Returns the elements that a layer caches of each token, and of each entry.

        A token has a key, and values and gates of an entry and of the index's.
        """
        own = self.layers.get(layer_index)
        if own is None:
            return self.head_dim, 0
        if not own.overlaps:
            return 3 * self.head_dim, self.head_dim
        index_size = self.index.head_dim
        return self.head_dim + 4 * (self.head_dim + index_size), self.head_dim + index_size

    @property
    def block_span(self) -> int:
        """Blocks of tokens that have as many as a block of entries: a power of two.

        A block has the same bytes in all layers, so that of entries is for more tokens: as many as
        fit in all layers that compress.
        """
        largest = max(self.row_sizes(layer)[0] for layer in self.layers)
        most = min(
            largest * own.rate // self.row_sizes(layer)[1] for layer, own in self.layers.items()
        )
        return int(min(MAX_SPAN, 2 ** (most.bit_length() - 1)))

    @property
    def recent_window(self) -> int:
        """Tokens before a position, its own included, whose rows a layer may read."""
        return max(self.window, *(each.span for each in self.layers.values()), 1)


def read_compression(fields: Fields, num_layers: int) -> CompressionConfig | None:
    """Reads the sizes of compressed attention; None if the model has another kind.

    Raises:
        ConfigError: a field is missing or ill-typed.
    """
    if not fields.has("o_lora_rank"):
        return None
    types = read_layer_types(fields, num_layers) or ()
    rates = {kind: _rate(fields, kind) for kind in _RATE_NAMES}
    head_dim, num_heads = fields.count("head_dim"), fields.count("num_attention_heads")
    if fields.has("qk_rope_head_dim"):
        rope_dim = fields.count("qk_rope_head_dim")
    else:
        rope_dim = int(head_dim * fields.number("partial_rotary_factor"))
    if rope_dim % 2 or not 0 < rope_dim <= min(head_dim, fields.count("index_head_dim")):
        raise fields.error("qk_rope_head_dim", "even, and at most head_dim and index_head_dim")
    num_groups = fields.count("o_groups")
    if num_heads % num_groups:
        raise fields.error("o_groups", f"a divisor of {num_heads} heads")
    if fields.count("num_key_value_heads", 1) != 1:
        raise fields.error("num_key_value_heads", "1")
    return CompressionConfig(
        head_dim=head_dim,
        rope_dim=rope_dim,
        q_lora_rank=fields.count("q_lora_rank"),
        num_output_groups=num_groups,
        o_lora_rank=fields.count("o_lora_rank"),
        window=fields.count("sliding_window"),
        layers={
            layer: LayerCompression(rate=rates[kind], overlaps=kind == SPARSE_COMPRESSED)
            for layer, kind in enumerate(types)
            if kind in rates
        },
        index=IndexConfig(
            num_heads=fields.count("index_n_heads"),
            head_dim=fields.count("index_head_dim"),
            top_k=fields.count("index_topk"),
            is_interleaved=True,
        ),
    )


def _rate(fields: Fields, kind: str) -> int:
    """Returns the tokens of an entry in layers of a kind."""
    if fields.has(_RATE_NAMES[kind]):
        return fields.count(_RATE_NAMES[kind])
    return fields.section("compress_rates").count(kind, _DEFAULT_RATES[kind])
