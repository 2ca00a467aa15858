"""Latent attention in config.json."""

from dataclasses import dataclass

from models.config_sections.fields import Fields

_GLM_5, _HY_4 = "GlmMoeDsaForCausalLM", "HYV4ForCausalLM"
_NORM_EPS = 1e-6
"""Epsilon of norms in latent attention and of index keys, whatever config.json sets for others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexConfig:
    """Sizes of the indexer that chooses which tokens a query attends to."""

    num_heads: int
    head_dim: int
    top_k: int
    """Most tokens that a query attends to."""
    is_interleaved: bool = False
    """Whether neighbours form a pair in the rotated elements of a head of the index."""
    rotates_last: bool = False
    """Whether the last elements of a head of the index are rotated, not the first ones."""
    key_norm_eps: float = _NORM_EPS
    """Epsilon of the norm of the index's keys."""
    sharing_layers: frozenset[int] = frozenset()
    """Layers without an indexer, which attend to what the last one before them chose."""


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
    norm_eps: float = _NORM_EPS
    """Epsilon of the norms of compressed queries and latent vectors."""
    has_sinks: bool = False
    """Whether each head has a sink, a learned score in its softmax without a key."""


def read_mla(fields: Fields, num_layers: int) -> MlaConfig | None:
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
        index=_read_index(fields, num_layers),
        norm_eps=fields.number("rms_norm_eps") if _is_hy4_vl(fields) else _NORM_EPS,
        has_sinks=fields.architecture() == _HY_4,
    )


def _is_hy4_vl(fields: Fields) -> bool:
    """Returns whether a model is the text part of Hy4's wrapper."""
    return fields.values.get("model_type") == "hy_v4_vl_text"


def _read_index(fields: Fields, num_layers: int) -> IndexConfig | None:
    """Reads the sizes of the indexer; None if queries attend to all tokens."""
    if not fields.has("index_topk"):
        return None
    is_hy4 = fields.architecture() == _HY_4
    if not fields.has("q_lora_rank"):
        raise fields.error("q_lora_rank", "given, as the indexer needs compressed queries")
    head_dim = fields.count("index_head_dim")
    if head_dim < fields.count("qk_rope_head_dim"):
        raise fields.error("index_head_dim", "at least qk_rope_head_dim")
    return IndexConfig(
        num_heads=fields.count("index_n_heads"),
        head_dim=head_dim,
        top_k=fields.count("index_topk"),
        is_interleaved=fields.architecture() == _GLM_5 or _is_hy4_vl(fields),
        rotates_last=is_hy4,
        key_norm_eps=fields.number("rms_norm_eps") if is_hy4 else _NORM_EPS,
        sharing_layers=_read_sharing(fields, num_layers),
    )


def _read_sharing(fields: Fields, num_layers: int) -> frozenset[int]:
    """Reads which layers have no indexer of their own: by list, letters, or every few layers."""
    if fields.architecture() not in (_GLM_5, _HY_4):
        return frozenset()
    names = ("indexer_types", "index_topk_pattern")
    name = next((each for each in names if fields.has(each)), None)
    if name is None:
        every = fields.count("index_topk_freq", 1)
        first = fields.count("index_skip_topk_offset", 2, minimum=0)
        own = [max(layer - first + 1, 0) % every == 0 for layer in range(num_layers)]
    else:
        kinds = fields.values[name]
        is_listed = isinstance(kinds, list | str) and len(kinds) == num_layers
        if not is_listed or any(kind not in ("full", "shared", "F", "S") for kind in kinds):
            raise fields.error(name, "full or shared for every layer")
        own = [kind in ("full", "F") for kind in kinds]
    if not own[0]:
        raise fields.error(name or "index_skip_topk_offset", "such that layer 0 is full")
    return frozenset(layer for layer, has_own in enumerate(own) if not has_own)
