"""Finds where a model folder describes its quantized weights."""

from models.config_sections.fields import ConfigError, Fields
from models.quantization.config import QuantizationConfig, QuantizationError
from models.quantization.float_tools import MIXED
from models.quantization.read import read_quantization

MODELOPT_FILE = "hf_quant_config.json"
"""Where ModelOpt describes weights, or single layers, that config.json says nothing of."""


def quantization_of(fields: Fields) -> QuantizationConfig | None:
    """Reads `quantization_config`, or ModelOpt's own file beside config.json; None without one."""
    name = "quantization_config"
    if not fields.has(name) and fields.has("compression_config"):
        name = "compression_config"  # compressed-tensors before 0.6
    file = fields.file
    values = fields.section(name).values if fields.has(name) else None
    # Older releases of ModelOpt leave out of config.json which layer has which format.
    is_mixed = values is not None and values.get("quant_algo") == MIXED
    is_elsewhere = values is None or (is_mixed and not values.get("quantized_layers"))
    if is_elsewhere and file.with_name(MODELOPT_FILE).exists():
        file = file.with_name(MODELOPT_FILE)
        values = Fields.read(file).values
    if values is None:
        return None
    if fields.has("expert_dtype"):
        values = {"expert_dtype": fields.values["expert_dtype"], **values}
    try:
        return read_quantization(values)
    except QuantizationError as error:
        raise ConfigError(f"{file}: {error}") from error
