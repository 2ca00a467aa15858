"""The config.json of an assistant of Gemma 4, read without torch.

Source: transformers 5.24, models/gemma4_assistant.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from models.config import CONFIG_FILE, ConfigError, ModelConfig
from models.config_sections.fields import Fields
from models.config_sections.gemma4 import GEMMA_4, read_global_heads
from models.config_sections.mixers import ATTENTION, SHARED
from models.config_sections.windows import read_sliding_windows

ARCHITECTURES = ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM")


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantConfig:
    """An assistant's config.json, for one model.

    layers: the model's layers, then the assistant's, which share caches of the model's.
    first_layer: number of the assistant's first.
    num_centroids: groups of tokens that are scored before their tokens are; 0: all tokens are.
    top_centroids: how many groups' tokens are.
    """

    layers: ModelConfig
    first_layer: int
    num_centroids: int = 0
    top_centroids: int = 0

    @classmethod
    def from_folder(cls, folder: Path, target: ModelConfig) -> "AssistantConfig":
        """Reads an assistant's config.

        Args:
            folder: the assistant's.
            target: the model's.

        Raises:
            ConfigError: it is broken, or does not fit the model.
        """
        whole = Fields.read(folder / CONFIG_FILE)
        if target.architecture not in GEMMA_4 or target.gemma4 is None:
            raise ConfigError(
                f"{folder} is an assistant of Gemma 4; the model is {target.architecture}"
            )
        text = whole.section("text_config")
        own = Fields(text.file, {**text.values, "architectures": [target.architecture]})
        num_layers, first = own.count("num_hidden_layers"), target.num_hidden_layers
        windows = read_sliding_windows(own, num_layers)
        for name, given, needed in (
            ("backbone_hidden_size", whole.count("backbone_hidden_size"), target.hidden_size),
            ("vocab_size", own.count("vocab_size"), target.vocab_size),
            ("head_dim", own.count("head_dim"), (target.local_heads or target).head_dim),
            ("head_dim without a window", read_global_heads(own).head_dim, target.head_dim),
        ):
            if given != needed:
                raise ConfigError(f"{folder}: its {name} is {given}; the model's is {needed}")
        if not set(windows) <= set(target.sliding_windows):
            raise ConfigError(
                f"{folder}: its layers have windows of {sorted(set(windows), key=str)}; the "
                f"model's of {sorted(set(target.sliding_windows), key=str)}"
            )
        num_heads = own.count("num_attention_heads")
        for layer in range(first):
            num_kv_heads = target.heads_of(layer).num_kv_heads
            if num_heads % num_kv_heads:
                raise own.error("num_attention_heads", f"a multiple of {num_kv_heads} kv heads")
        layers = replace(
            target,
            hidden_size=own.count("hidden_size"),
            intermediate_size=own.count("intermediate_size"),
            num_hidden_layers=first + num_layers,
            num_attention_heads=num_heads,
            rms_norm_eps=own.number("rms_norm_eps"),
            attention_bias=own.flag("attention_bias"),
            attention_output_bias=own.flag("attention_bias"),
            sliding_windows=target.sliding_windows + windows,
            mixers=(target.mixers or (ATTENTION,) * first) + (SHARED,) * num_layers,
            gemma4=replace(target.gemma4, token_size=0, sharing_scale=1),
            moe=None,
            vision=None,
            quantization=None,
        )
        if not whole.flag("use_ordered_embeddings"):
            return cls(layers=layers, first_layer=first)
        num_centroids = whole.count("num_centroids", 2048)
        if target.vocab_size % num_centroids:
            raise whole.error("num_centroids", f"a divisor of {target.vocab_size} tokens")
        top = whole.count("centroid_intermediate_top_k", 32)
        return cls(
            layers=layers,
            first_layer=first,
            num_centroids=num_centroids,
            top_centroids=min(top, num_centroids),
        )


def is_assistant(folder: Path) -> bool:
    """Returns whether a folder holds an assistant of Gemma 4.

    Raises:
        ConfigError: its config.json is missing or broken.
    """
    return Fields.read(folder / CONFIG_FILE).architecture() in ARCHITECTURES
