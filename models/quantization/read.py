"""Reads the quantization_config of any supported tool."""

from collections.abc import Callable, Mapping
from typing import Any

from models.config_sections.fields import ConfigError, Fields
from models.quantization.auto_round import read_auto_round
from models.quantization.compressed_tensors import read_compressed_tensors
from models.quantization.config import QuantizationConfig, QuantizationError
from models.quantization.float_tools import (
    MIXED,
    read_fp8,
    read_modelopt,
    read_mxfp8,
    read_stacked_mxfp4,
)
from models.quantization.gguf import read_gguf
from models.quantization.integer_tools import read_awq, read_gptq
from models.quantization.quark import read_quark

MODELOPT_FILE = "hf_quant_config.json"
"""Where ModelOpt describes weights, or single layers, that config.json says nothing of."""

READERS: dict[str, Callable[[Mapping[str, Any]], QuantizationConfig]] = {
    "fp8": read_fp8,
    "fbgemm_fp8": read_fp8,
    "compressed-tensors": read_compressed_tensors,
    "compressed_tensors": read_compressed_tensors,
    "modelopt": read_modelopt,
    "modelopt_fp4": read_modelopt,
    "awq": read_awq,
    "gptq": read_gptq,
    "auto-round": read_auto_round,
    "intel/auto-round": read_auto_round,
    "gguf": read_gguf,
    "mxfp8": read_mxfp8,
    "mxfp4": read_stacked_mxfp4,
    "quark": read_quark,
}
"""quant_method of config.json -> its reader."""


def read_quantization(fields: Mapping[str, Any]) -> QuantizationConfig:
    """Reads the object as Hugging Face checkpoints write it.

    Raises:
        QuantizationError: a field is ill-typed or names an unsupported format.
    """
    method = fields.get("quant_method")
    producer = fields.get("producer")
    # hf_quant_config.json names no method.
    if method is None and isinstance(producer, dict) and producer.get("name") == "modelopt":
        method = "modelopt"
    reader = READERS.get(method) if isinstance(method, str) else None
    if reader is None:
        hint = "" if method is not None else " (MLX checkpoints name none)"
        raise QuantizationError("quant_method", method, f"one of {', '.join(READERS)}{hint}")
    return reader(fields)


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
