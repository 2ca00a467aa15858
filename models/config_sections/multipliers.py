"""Factors and soft caps of a model's activations in config.json."""

from dataclasses import dataclass

from models.config_sections.fields import Fields
from models.config_sections.gemma4 import GEMMA_4


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridFactors:
    """Factors of layers with attention and a state side by side.

    state_parts: of projected gates, inputs, what writes and what reads states, and time steps.
    feed_forward: of its gate, before the activation, and of its output.
    """

    attention_input: float
    attention_output: float
    state_input: float
    state_output: float
    state_parts: tuple[float, ...]
    feed_forward: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SumFactors:
    """Factors of the input and of the output of each kind of sub-layer, where they are added."""

    attention: tuple[float, float]
    lightning: tuple[float, float]
    feed_forward: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Multipliers:
    """Factors that a family puts on activations. A soft cap c > 0 makes x c * tanh(x / c)."""

    embedding: float = 1.0
    """Of the tokens' vectors."""
    residual: float = 1.0
    """Of each sub-layer's output."""
    logits: float = 1.0
    attention: float | None = None
    """Of attention scores; None means 1 / sqrt(head size)."""
    attention_cap: float = 0.0
    """Soft cap of scaled attention scores; 0 means none."""
    logits_cap: float = 0.0
    """Soft cap of logits; 0 means none."""
    hybrid: HybridFactors | None = None
    weighed_sums: SumFactors | None = None


def read_multipliers(fields: Fields) -> Multipliers:
    """Reads the factors of the families that have some. Defaults are transformers'.

    fields: as stored, without defaults, since null means no cap where absence means a default.

    Raises:
        ConfigError: a field is ill-typed, or asks for an unsupported feature.
    """
    architecture = fields.architecture()
    if architecture.startswith("Granite"):
        return Multipliers(
            embedding=fields.number("embedding_multiplier", 1.0),
            residual=fields.number("residual_multiplier", 1.0),
            logits=1.0 / fields.number("logits_scaling", 1.0),
            attention=fields.number("attention_multiplier", 1.0),
        )
    if architecture.startswith("FalconH1"):
        return _read_falcon(fields)
    if architecture == "MiniMaxForCausalLM":
        attention, lightning, feed_forward = (
            (fields.number(f"{part}_alpha_factor", 1.0), fields.number(f"{part}_beta_factor", 1.0))
            for part in ("full_attn", "linear_attn", "mlp")
        )
        sums = SumFactors(attention=attention, lightning=lightning, feed_forward=feed_forward)
        return Multipliers(weighed_sums=sums)
    if architecture == "Cohere2ForCausalLM":
        return Multipliers(logits=fields.number("logit_scale", 0.0625))
    if not architecture.startswith("Gemma"):
        return Multipliers()
    if architecture in GEMMA_4:
        return Multipliers(
            embedding=fields.count("hidden_size") ** 0.5,
            attention=1.0,
            logits_cap=_cap(fields, "final_logit_softcapping", 0.0),
        )
    is_second = architecture.startswith("Gemma2")
    if not is_second and fields.has("attn_logit_softcapping"):
        raise fields.error("attn_logit_softcapping", "null")
    return Multipliers(
        embedding=fields.count("hidden_size") ** 0.5,
        attention=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        attention_cap=_cap(fields, "attn_logit_softcapping", 50.0) if is_second else 0.0,
        logits_cap=_cap(fields, "final_logit_softcapping", 30.0 if is_second else 0.0),
    )


def _read_falcon(fields: Fields) -> Multipliers:
    """Reads the factors of Falcon-H1; that of keys counts among those of scores."""
    num_heads = fields.count("num_attention_heads")
    head_dim = fields.count("head_dim", fields.count("hidden_size") // num_heads)
    has_mlp, has_parts = fields.has("mlp_multipliers"), fields.has("ssm_multipliers")
    return Multipliers(
        embedding=fields.number("embedding_multiplier", 1.0),
        logits=fields.number("lm_head_multiplier", 1.0),
        attention=head_dim**-0.5 * fields.number("key_multiplier", 1.0),
        hybrid=HybridFactors(
            attention_input=fields.number("attention_in_multiplier", 1.0),
            attention_output=fields.number("attention_out_multiplier", 1.0),
            state_input=fields.number("ssm_in_multiplier", 1.0),
            state_output=fields.number("ssm_out_multiplier", 1.0),
            state_parts=fields.numbers("ssm_multipliers", 5) if has_parts else (1.0,) * 5,
            feed_forward=fields.numbers("mlp_multipliers", 2) if has_mlp else (1.0, 1.0),
        ),
    )


def _cap(fields: Fields, name: str, default: float) -> float:
    """Returns a soft cap: the default if absent, 0 if null."""
    if (name in fields.values or not default) and not fields.has(name):
        return 0.0
    return fields.number(name, default)
