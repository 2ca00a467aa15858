"""Latent attention in config.json."""

from dataclasses import dataclass

from models.config_sections.fields import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexConfig:
    """Sizes of the indexer that chooses which tokens a query attends to."""

    num_heads: int
    head_dim: int
    top_k: int
    """Most tokens that a query attends to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaConfig:
    """Sizes of multi-head latent attention."""

    q_lora_rank: int | None
    """Size of the compressed queries; None if queries are projected in one step."""
    kv_lora_rank: int
    """Size of the latent vector that keys and values are made from."""
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index: IndexConfig | None = None


def read_mla(fields: Fields) -> MlaConfig | None:
    """Reads the sizes of latent attention; None if the model has another kind.

    Raises:
        ConfigError: a field is missing or ill-typed.
    """
    if not fields.has("kv_lora_rank"):
        return None
    rope_size = fields.count("qk_rope_head_dim")
    if rope_size % 2:
        raise fields.error("qk_rope_head_dim", "even, as rotary embedding turns pairs")
    return MlaConfig(
        q_lora_rank=fields.count("q_lora_rank") if fields.has("q_lora_rank") else None,
        kv_lora_rank=fields.count("kv_lora_rank"),
        qk_nope_head_dim=fields.count("qk_nope_head_dim"),
        qk_rope_head_dim=rope_size,
        v_head_dim=fields.count("v_head_dim"),
        index=_read_index(fields),
    )


def _read_index(fields: Fields) -> IndexConfig | None:
    """Reads the sizes of the indexer; None if queries attend to all tokens."""
    if not fields.has("index_topk"):
        return None
    if not fields.has("q_lora_rank"):
        raise fields.error("q_lora_rank", "given, as the indexer needs compressed queries")
    head_dim = fields.count("index_head_dim")
    if head_dim < fields.count("qk_rope_head_dim"):
        raise fields.error("index_head_dim", "at least qk_rope_head_dim")
    return IndexConfig(
        num_heads=fields.count("index_n_heads"),
        head_dim=head_dim,
        top_k=fields.count("index_topk"),
    )
