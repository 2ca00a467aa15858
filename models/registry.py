"""Which model class serves which architecture name of config.json."""

from collections.abc import Callable

from models.config import ConfigError, ModelConfig
from models.layers.decoder import CausalLM
from models.llama import LlamaForCausalLM
from models.parallel.group import ParallelGroup
from models.qwen3 import Qwen3ForCausalLM

ARCHITECTURES: dict[str, Callable[[ModelConfig, ParallelGroup], CausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
}


class UnsupportedArchitectureError(ConfigError):
    """No model class serves this architecture."""


def model_class(architecture: str) -> Callable[[ModelConfig, ParallelGroup], CausalLM]:
    """Returns the class that builds a model of this architecture from a config and a group.

    Raises:
        UnsupportedArchitectureError: there is none; the message lists those there are.
    """
    try:
        return ARCHITECTURES[architecture]
    except KeyError:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedArchitectureError(
            f"architecture {architecture!r} is not supported; the supported ones are {known}"
        ) from None
