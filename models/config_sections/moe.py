"""Mixtures of experts in config.json."""

from dataclasses import dataclass

from models.config_sections.families import (
    FAMILIES_WITH_CHOSEN_BLOCKS,
    FAMILIES_WITH_COMPRESSION,
)
from models.config_sections.fields import Fields
from models.config_sections.gemma4 import GEMMA_4
from models.config_sections.layer_types import read_layer_types

_EXPERT_COUNTS = ("n_routed_experts", "num_local_experts", "num_experts")

_LLAMA_4 = "Llama4ForCausalLM"
_GRANITE_HYBRID = "GraniteMoeHybridForCausalLM"
_WITHOUT_GROUPS = ("Mistral4ForCausalLM", "MistralLarge3ForCausalLM")
"""Families that would compare groups of softmax scores by two experts each, which ours do not."""

_CLAMPING_ALONE = (*FAMILIES_WITH_COMPRESSION, "HYV4ForCausalLM")
"""Families that clamp gate and up, and change nothing else of a silu's gate."""

_CLAMPING_ALL = (*FAMILIES_WITH_COMPRESSION, *FAMILIES_WITH_CHOSEN_BLOCKS)
"""Families whose dense and shared layers have the gate of experts."""

_WITH_CORRECTION = ("sigmoid", "sqrtsoftplus")

TOPK_METHODS = ("greedy", "group_limited_greedy", "noaux_tc")
"""DeepSeek's names of ways to choose experts; scoring_func decides how groups are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """Routed and shared experts of the sparse layers."""

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    """Of one expert."""
    scoring_func: str
    """softmax; or sigmoid or sqrtsoftplus, whose scores get a correction bias for the choice of
    experts."""
    norm_topk_prob: bool
    """Whether the weights of a token's experts are scaled to sum to 1."""
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    """Equal groups of experts; a token's experts come from topk_group of them."""
    topk_group: int = 1
    shared_size: int = 0
    """Inner size of the layer that every token uses besides its experts; 0 means none."""
    has_shared_gate: bool = False
    """Whether a gate of its own weighs that layer's output for each token."""
    scales_input: bool = False
    """Whether the sigmoid of a token's best logit scales the input of its one expert, not its
    output."""
    latent_size: int = 0
    """Size of the projected hidden state that experts work on; 0: they work on itself."""
    dense_layers: frozenset[int] = frozenset()
    """Layers without experts."""
    hash_layers: frozenset[int] = frozenset()
    """Layers in which a table gives the experts of each token id."""
    swiglu_alpha: float = 1.0
    swiglu_limit: float | None = None
    """Clamps gate and up; then the gate is gate * sigmoid(alpha * gate), and 1 is added to up."""
    adds_one: bool = True
    """Whether 1 is added to a clamped up."""
    clamps_all: bool = False
    """Whether dense and shared layers have the gate of clamped experts, too."""


def read_moe(fields: Fields, num_hidden_layers: int) -> MoeConfig | None:
    """Reads the experts of a model; None if it has none.

    Raises:
        ConfigError: a field is missing or ill-typed, or the routing is not supported.
    """
    count_name = _count_name(fields)
    if count_name is None:
        return None
    if not fields.flag("use_expert_bias", default=True):
        raise fields.error("use_expert_bias", "true")
    clamps_alone = fields.architecture() in _CLAMPING_ALONE
    dense_layers = _read_dense_layers(fields, num_hidden_layers)
    is_nemotron = fields.architecture() == "NemotronHForCausalLM"
    if is_nemotron and len(dense_layers) == num_hidden_layers:
        return None
    num_experts = fields.count(count_name)
    num_experts_per_tok = fields.count("num_experts_per_tok")
    scales_input = fields.architecture() == _LLAMA_4
    most = 1 if scales_input else num_experts
    if num_experts_per_tok > most:
        wanted = "1" if scales_input else f"at most the {num_experts} experts there are"
        raise fields.error("num_experts_per_tok", wanted)
    fields.choice("topk_method", TOPK_METHODS, TOPK_METHODS[0])
    is_v2 = fields.has("topk_method") and fields.values.get("scoring_func") not in _WITH_CORRECTION
    if is_v2 and fields.flag("norm_topk_prob"):
        # Implementations differ: the paper's then skips the scaling factor, others the norm.
        raise fields.error("norm_topk_prob", "false with softmax scores and a topk_method")
    size_name = "moe_intermediate_size"
    n_group, topk_group = _read_groups(fields, count_name, num_experts)
    if num_experts_per_tok > num_experts // n_group * topk_group:
        raise fields.error("num_experts_per_tok", f"at most the experts of {topk_group} groups")
    size = fields.count(size_name if fields.has(size_name) else "intermediate_size")
    has_shared_gate = fields.has("shared_expert_intermediate_size")
    shared_size = size * fields.count("n_shared_experts", 0, minimum=0)
    if has_shared_gate:
        shared_size = fields.count("shared_expert_intermediate_size")
    if fields.architecture() in (_GRANITE_HYBRID, *FAMILIES_WITH_CHOSEN_BLOCKS):
        shared_size = fields.count("shared_intermediate_size")
    elif is_nemotron:
        shared_size = fields.count("moe_shared_expert_intermediate_size")
    return MoeConfig(
        num_experts=num_experts,
        num_experts_per_tok=num_experts_per_tok,
        intermediate_size=size,
        scoring_func=fields.choice("scoring_func", _scores_of(fields), "softmax"),
        norm_topk_prob=fields.flag("norm_topk_prob"),
        routed_scaling_factor=fields.number("routed_scaling_factor", 1.0),
        n_group=n_group,
        topk_group=topk_group,
        shared_size=shared_size,
        has_shared_gate=has_shared_gate,
        scales_input=scales_input,
        latent_size=fields.count("moe_latent_size", 0),
        dense_layers=dense_layers,
        hash_layers=_read_hash_layers(fields, num_hidden_layers),
        swiglu_alpha=1.0 if clamps_alone else fields.number("swiglu_alpha", 1.702),
        swiglu_limit=fields.number("swiglu_limit") if fields.has("swiglu_limit") else None,
        adds_one=not clamps_alone,
        clamps_all=fields.architecture() in _CLAMPING_ALL and fields.has("swiglu_limit"),
    )


def _scores_of(fields: Fields) -> tuple[str, ...]:
    """Returns the scores that a family may have."""
    is_compressed = fields.architecture() in FAMILIES_WITH_COMPRESSION
    return ("sqrtsoftplus",) if is_compressed else ("softmax", "sigmoid")


def _read_hash_layers(fields: Fields, num_layers: int) -> frozenset[int]:
    """Returns the layers in which a table gives the experts of each token id."""
    if fields.architecture() not in FAMILIES_WITH_COMPRESSION:
        return frozenset()
    kinds = fields.values.get("mlp_layer_types")
    if kinds is None:
        return frozenset(range(fields.count("num_hash_layers", 3, minimum=0)))
    is_list = isinstance(kinds, list) and len(kinds) == num_layers
    if not is_list or any(kind not in ("hash_moe", "moe") for kind in kinds):
        raise fields.error("mlp_layer_types", "hash_moe or moe for every layer")
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == "hash_moe")


def _count_name(fields: Fields) -> str | None:
    """Returns the field with the number of experts; None if there are none."""
    if fields.architecture() in GEMMA_4 and not fields.flag("enable_moe_block"):
        return None
    names = (name for name in _EXPERT_COUNTS if fields.has(name))
    return next((name for name in names if fields.values[name] != 0), None)


def read_inner_size(fields: Fields) -> int:
    """Reads the inner size of dense feed-forward layers; a family without any has that of experts.

    Raises:
        ConfigError: a field is missing or ill-typed.
    """
    if fields.architecture() == _GRANITE_HYBRID:
        return fields.count("shared_intermediate_size")
    if fields.architecture() in FAMILIES_WITH_CHOSEN_BLOCKS:
        return fields.count("dense_intermediate_size")
    name = "moe_intermediate_size"
    size = fields.count("intermediate_size", fields.count(name) if fields.has(name) else None)
    if fields.architecture() != "Lfm2ForCausalLM" or not fields.flag(
        "block_auto_adjust_ff_dim", default=True
    ):
        return size
    multiple = fields.count("block_multiple_of", 256)
    size = int(fields.number("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    return -(-size // multiple) * multiple


def _read_groups(fields: Fields, count_name: str, num_experts: int) -> tuple[int, int]:
    """Returns the number of groups of experts, and how many of them a token chooses from."""
    if fields.values.get("topk_method") == "greedy":
        return 1, 1
    n_group, topk_group = fields.count("n_group", 1), fields.count("topk_group", 1)
    if n_group > 1 and fields.architecture() in _WITHOUT_GROUPS:
        raise fields.error("n_group", "1")
    if num_experts % n_group:
        raise fields.error(count_name, f"a multiple of n_group, {n_group}")
    if topk_group > n_group:
        raise fields.error("topk_group", f"at most n_group, {n_group}")
    if fields.values.get("scoring_func") == "sigmoid" and num_experts // n_group < 2:
        raise fields.error("n_group", "at most half the number of experts")
    return n_group, topk_group


def _read_dense_layers(fields: Fields, num_hidden_layers: int) -> frozenset[int]:
    """Returns the layers without experts, from either set of field names."""
    if fields.architecture() in FAMILIES_WITH_COMPRESSION:
        return frozenset()
    if fields.architecture() == "NemotronHForCausalLM":
        types = read_layer_types(fields, num_hidden_layers) or ()
        return frozenset(layer for layer, kind in enumerate(types) if kind != "moe")
    if isinstance(has_experts := fields.values.get("moe_layer_freq"), list):
        if len(has_experts) != num_hidden_layers:
            raise fields.error("moe_layer_freq", "0 or 1 for every layer; 1 has experts")
        return frozenset(layer for layer, each in enumerate(has_experts) if not each)
    if fields.count("moe_layer_freq", 1) != 1:
        raise fields.error("moe_layer_freq", "1")
    kinds = fields.values.get("mlp_layer_types")
    if kinds is not None:
        is_list = isinstance(kinds, list) and len(kinds) == num_hidden_layers
        if not is_list or any(kind not in ("dense", "sparse") for kind in kinds):
            raise fields.error("mlp_layer_types", "dense or sparse for every layer")
        return frozenset(layer for layer, kind in enumerate(kinds) if kind == "dense")
    layers = range(num_hidden_layers)
    if fields.values.get("moe_layers") is not None:
        return frozenset(layers) - set(fields.layer_numbers("moe_layers"))
    first_sparse = fields.count("first_k_dense_replace", 0, minimum=0)
    step_name = "interleave_moe_layer_step"
    step = fields.count(step_name if fields.has(step_name) else "decoder_sparse_step", 1)
    named = frozenset(fields.layer_numbers("mlp_only_layers"))
    return frozenset(
        layer for layer in layers if layer < first_sparse or layer in named or (layer + 1) % step
    )
