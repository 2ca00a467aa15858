"""Log lines of a model that is loaded."""

from dataclasses import asdict

import structlog

from models.config import ModelConfig
from models.layers.decoder import CausalLM

log = structlog.get_logger()


def log_weights(model: CausalLM) -> None:
    """Logs how weights are kept, and what products and the reader make of the checkpoint."""
    for each in model.weight_formats:
        log.info("weights_kept", **asdict(each))
    quantization = model.config.quantization
    if quantization is None:
        return
    for made_for in quantization.unrounded_activations:
        log.info("activations_not_rounded", made_for=made_for, used="weights only")
    if quantization.assumes_zero_points:
        log.warning("zero_points_assumed", checkpoint_format="gptq", alternative="gptq_v2")


def implementation_of(model: ModelConfig) -> str:
    """Names whose modules run a model, for a log line."""
    facts = model.transformers
    return "octavo" if facts is None else f"transformers {facts.version}"
