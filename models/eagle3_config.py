"""The config.json of an EAGLE-3 head, read without torch."""

from dataclasses import dataclass, replace
from pathlib import Path

from models.config import CONFIG_FILE, ConfigError, ModelConfig
from models.config_sections.fields import Fields
from models.config_sections.mrope import read_head_axes

ARCHITECTURE = "LlamaForCausalLMEagle3"
TARGETS = (
    "GptOssForCausalLM",
    "LlamaForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3VLMoeForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
)
"""Families whose states a head may read."""
NUM_STATES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config:
    """A head's config.json, for one model.

    layer: sizes of the head's layer. draft_vocab_size: tokens that it may guess. aux_layers: the
    model's layers whose outputs it reads. target: the model.
    """

    layer: ModelConfig
    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    target: ModelConfig

    @classmethod
    def from_folder(
        cls, folder: Path, target: ModelConfig, *, max_positions: int = 0
    ) -> "Eagle3Config":
        """Reads a head's config.

        Args:
            folder: the head's.
            target: the model's.
            max_positions: longest sequence, in tokens; the head has rotations for as many.

        Raises:
            ConfigError: it is broken, or does not fit the model.
        """
        fields = Fields.read(folder / CONFIG_FILE)
        own = ModelConfig.from_folder(folder)
        if target.architecture not in TARGETS:
            raise ConfigError(
                f"{folder} is an EAGLE-3 head, for one of {', '.join(TARGETS)}; the model is "
                f"{target.architecture}"
            )
        if own.hidden_size != target.hidden_size:
            raise ConfigError(
                f"{folder} has a hidden_size of {own.hidden_size}; the model's is "
                f"{target.hidden_size}"
            )
        if own.vocab_size != target.vocab_size:
            raise ConfigError(
                f"{folder} has a vocabulary of {own.vocab_size} tokens; the model has "
                f"{target.vocab_size}"
            )
        name, last = "eagle_aux_hidden_state_layer_ids", target.num_hidden_layers - 1
        chosen = fields.section("eagle_config").layer_numbers(name) or fields.layer_numbers(name)
        middle = (1, target.num_hidden_layers // 2 - 1, last - 3)
        aux_layers = chosen or tuple(min(max(layer, 0), last) for layer in middle)
        if len(aux_layers) != NUM_STATES or max(aux_layers) > last:
            raise fields.error(name, f"{NUM_STATES} layers from 0 to {last}")
        draft_vocab_size = fields.count("draft_vocab_size", own.vocab_size)
        if draft_vocab_size > own.vocab_size:
            raise fields.error("draft_vocab_size", f"at most vocab_size, which is {own.vocab_size}")
        num_positions = max(own.max_position_embeddings, max_positions)
        # Without images all three axes have the position in the sequence.
        num_pairs = int(own.head_dim * own.rope.partial_rotary_factor) // 2
        axes = read_head_axes(fields, num_pairs) if target.vision is not None else ()
        return cls(
            layer=replace(
                own, max_position_embeddings=num_positions, rope=replace(own.rope, axes=axes)
            ),
            draft_vocab_size=draft_vocab_size,
            aux_layers=aux_layers,
            target=target,
        )


def is_eagle3(folder: Path) -> bool:
    """Returns whether a folder holds an EAGLE-3 head.

    Raises:
        ConfigError: its config.json is missing or broken.
    """
    return Fields.read(folder / CONFIG_FILE).architecture() == ARCHITECTURE
