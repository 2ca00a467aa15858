"""Sizes of layers that keep a state, in config.json."""

from dataclasses import dataclass

from models.config_sections.fields import LARGEST_NUMBER, Fields

STATE_DTYPES = ("float32", "bfloat16", "float16")
MIN_CONV_WIDTH, MAX_CONV_WIDTH = 2, 8

_WITH_MAMBA2 = (
    "FalconH1ForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "Mamba2ForCausalLM",
    "NemotronHForCausalLM",
)
_WITH_DELTA_NETS = (
    "OlmoHybridForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
)
_WITH_KIMI_DELTA = ("BailingHybridForCausalLM", "KimiLinearForCausalLM")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetConfig:
    """Layers of Gated DeltaNet or Kimi Delta Attention.

    state_dtype: one of STATE_DTYPES. norm_eps: of the norm of outputs. beta_scale: factor of the
    share that a token overwrites. decay_floor: least logarithm of a decay, which is then a sigmoid;
    None: a softplus without floor.
    """

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_width: int
    norm_eps: float
    beta_scale: float = 1.0
    decay_floor: float | None = None
    state_dtype: str = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Config:
    """Layers of Mamba 2.

    num_groups: of heads that share what writes and reads their states. dt_min, dt_max: bounds of
    time steps. has_norm: whether outputs are normalised, beside a gate that all have.
    """

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    conv_width: int
    has_conv_bias: bool
    has_input_bias: bool
    has_output_bias: bool
    has_norm: bool
    norm_before_gate: bool
    dt_min: float
    dt_max: float
    state_dtype: str = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvConfig:
    """Layers of short convolutions. width: inputs of an output, its own included."""

    width: int
    has_bias: bool


def read_delta_net(fields: Fields) -> DeltaNetConfig | None:
    """Reads the layers of Gated DeltaNet; None of a family without any.

    Raises:
        ConfigError: a field is ill-typed, or asks for an unsupported feature.
    """
    if fields.architecture() in _WITH_KIMI_DELTA:
        return _read_kimi_delta(fields)
    if fields.architecture() not in _WITH_DELTA_NETS:
        return None
    is_olmo = fields.architecture() == "OlmoHybridForCausalLM"
    num_heads = fields.count("num_attention_heads") if is_olmo else None
    num_k_heads = fields.count("linear_num_key_heads", num_heads)
    num_v_heads = fields.count("linear_num_value_heads", num_heads)
    if num_v_heads % num_k_heads:
        raise fields.error("linear_num_value_heads", f"a multiple of {num_k_heads} key heads")
    k_dim = int(0.75 * fields.count("hidden_size") / num_k_heads) if is_olmo else None
    head_k_dim = fields.count("linear_key_head_dim", k_dim)
    doubles = is_olmo and fields.flag("linear_allow_neg_eigval", default=True)
    return DeltaNetConfig(
        num_k_heads=num_k_heads,
        num_v_heads=num_v_heads,
        head_k_dim=head_k_dim,
        head_v_dim=fields.count("linear_value_head_dim", 2 * head_k_dim if is_olmo else None),
        conv_width=_conv_width(fields, "linear_conv_kernel_dim"),
        norm_eps=1e-5 if is_olmo else fields.number("rms_norm_eps"),
        beta_scale=2.0 if doubles else 1.0,
        state_dtype=_state_dtype(fields),
    )


def _read_kimi_delta(fields: Fields) -> DeltaNetConfig:
    """Reads Kimi Delta Attention, whose heads of keys and values are alike."""
    section = fields.section("linear_attn_config")
    is_bailing = fields.architecture() == "BailingHybridForCausalLM"
    num_heads = fields.count("num_attention_heads" if is_bailing else "linear_num_heads", 32)
    # transformers stores Ling's under the first name, and the rotated part's under the second.
    has_own = not is_bailing or fields.has("linear_head_dim")
    head_dim = fields.count("linear_head_dim" if has_own else "head_dim", 128)
    width_name = "short_conv_kernel_size" if is_bailing else "linear_conv_kernel_dim"
    conv_width = _conv_width(fields, width_name)
    if section.values:
        num_heads, head_dim = section.count("num_heads"), section.count("head_dim")
        conv_width = _conv_width(section, "short_conv_kernel_size")
    floor = None
    if is_bailing and fields.flag("kda_safe_gate", default=True):
        floor = fields.values.get("kda_lower_bound", -5.0)
        if type(floor) not in (int, float) or not -1000 <= floor < 0:
            raise fields.error("kda_lower_bound", "a negative number")
    return DeltaNetConfig(
        num_k_heads=num_heads,
        num_v_heads=num_heads,
        head_k_dim=head_dim,
        head_v_dim=head_dim,
        conv_width=conv_width,
        norm_eps=fields.number("rms_norm_eps"),
        decay_floor=floor,
        state_dtype=_state_dtype(fields),
    )


def read_mamba2(fields: Fields) -> Mamba2Config | None:
    """Reads the layers of Mamba 2; None of a family without any.

    Raises:
        ConfigError: a field is ill-typed, or asks for an unsupported feature.
    """
    architecture = fields.architecture()
    if architecture not in _WITH_MAMBA2:
        return None
    fields.choice("mamba_hidden_act", ("silu",), "silu")
    num_heads = fields.count("mamba_n_heads", 128)
    inner = fields.count("mamba_expand", 2) * fields.count("hidden_size")
    if architecture == "FalconH1ForCausalLM":
        inner = fields.count("mamba_d_ssm", inner)
    is_auto = fields.values.get("mamba_d_head", "auto") == "auto"
    head_dim = inner // num_heads if is_auto else fields.count("mamba_d_head")
    num_groups = fields.count("mamba_n_groups", 1)
    if num_heads % num_groups:
        raise fields.error("mamba_n_groups", f"a divisor of {num_heads} heads")
    has_bias = fields.flag("mamba_proj_bias")
    is_falcon = architecture == "FalconH1ForCausalLM"
    dt_min, dt_max = _time_steps(fields)
    return Mamba2Config(
        num_heads=num_heads,
        head_dim=head_dim,
        state_size=fields.count("mamba_d_state", 128),
        num_groups=num_groups,
        conv_width=_conv_width(fields, "mamba_d_conv"),
        has_conv_bias=fields.flag("mamba_conv_bias", default=True),
        has_input_bias=has_bias,
        has_output_bias=fields.flag("projectors_bias") if is_falcon else has_bias,
        has_norm=fields.flag("mamba_rms_norm") if is_falcon else True,
        norm_before_gate=is_falcon and fields.flag("mamba_norm_before_gate", default=True),
        dt_min=dt_min,
        dt_max=dt_max,
        state_dtype=_state_dtype(fields),
    )


def read_short_conv(fields: Fields) -> ShortConvConfig | None:
    """Reads the layers of short convolutions; None of a family without any.

    Raises:
        ConfigError: a field is ill-typed.
    """
    if not fields.architecture().startswith("Lfm2"):
        return None
    return ShortConvConfig(
        width=_conv_width(fields, "conv_L_cache", 3), has_bias=fields.flag("conv_bias")
    )


def _time_steps(fields: Fields) -> tuple[float, float]:
    """Reads the bounds of time steps; infinity becomes the largest number."""
    limits = fields.values.get("time_step_limit")
    if limits is None:
        return 0.0, LARGEST_NUMBER
    is_pair = isinstance(limits, list) and len(limits) == 2
    if not is_pair or any(type(each) not in (int, float) for each in limits):
        raise fields.error("time_step_limit", "the least and the largest time step")
    least, most = (min(float(each), LARGEST_NUMBER) for each in limits)
    if not 0 <= least < most:
        raise fields.error("time_step_limit", "the least and the largest time step")
    return least, most


def _state_dtype(fields: Fields) -> str:
    return fields.choice("mamba_ssm_dtype", STATE_DTYPES, "float32")


def _conv_width(fields: Fields, name: str, default: int = 4) -> int:
    """Reads the inputs that an output of a convolution sees, its own included."""
    width = fields.count(name, default)
    if not MIN_CONV_WIDTH <= width <= MAX_CONV_WIDTH:
        raise fields.error(name, f"from {MIN_CONV_WIDTH} to {MAX_CONV_WIDTH}")
    return width
