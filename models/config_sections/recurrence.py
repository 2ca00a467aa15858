"""Sizes of layers that keep a state, in config.json."""

from dataclasses import dataclass

from models.config_sections.fields import Fields

STATE_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetConfig:
    """Layers of Gated DeltaNet.

    state_dtype: one of STATE_DTYPES. beta_scale: factor of the share that a token overwrites.
    """

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_width: int
    beta_scale: float = 1.0
    state_dtype: str = "float32"


RecurrenceConfig = DeltaNetConfig


def read_recurrence(fields: Fields) -> RecurrenceConfig | None:
    """Reads the layers that keep a state; None of a family without any.

    Raises:
        ConfigError: a field is ill-typed, or asks for an unsupported feature.
    """
    if fields.architecture().startswith("Qwen3"):
        return _read_delta_net(fields) if fields.has("linear_num_value_heads") else None
    return None


def _read_delta_net(fields: Fields) -> DeltaNetConfig:
    num_k_heads = fields.count("linear_num_key_heads")
    num_v_heads = fields.count("linear_num_value_heads")
    if num_v_heads % num_k_heads:
        raise fields.error("linear_num_value_heads", f"a multiple of {num_k_heads} key heads")
    return DeltaNetConfig(
        num_k_heads=num_k_heads,
        num_v_heads=num_v_heads,
        head_k_dim=fields.count("linear_key_head_dim"),
        head_v_dim=fields.count("linear_value_head_dim"),
        conv_width=_conv_width(fields, "linear_conv_kernel_dim"),
        state_dtype=fields.choice("mamba_ssm_dtype", STATE_DTYPES, "float32"),
    )


def _conv_width(fields: Fields, name: str) -> int:
    """Reads the inputs that an output of a convolution sees, its own included."""
    width = fields.count(name, 4)
    if not MIN_CONV_WIDTH <= width <= MAX_CONV_WIDTH:
        raise fields.error(name, f"from {MIN_CONV_WIDTH} to {MAX_CONV_WIDTH}")
    return width


MIN_CONV_WIDTH, MAX_CONV_WIDTH = 2, 8
