"""Rotation of a head's pairs by positions in time, height and width (M-RoPE), in config.json."""

from collections.abc import Sequence

from models.config_sections.fields import Fields

_NAME = "mrope_section"
_SECTIONS = {
    "Glm4vForConditionalGeneration": (8, 12, 12),
    "Glm4vMoeForConditionalGeneration": (8, 12, 12),
    "HYV4VLForConditionalGeneration": (12, 10, 10),
    "Qwen2VLForConditionalGeneration": (16, 24, 24),
    "Qwen2_5_VLForConditionalGeneration": (16, 24, 24),
    "Qwen3VLForConditionalGeneration": (24, 20, 20),
    "Qwen3VLMoeForConditionalGeneration": (24, 20, 20),
    "Qwen3_5ForConditionalGeneration": (11, 11, 10),
    "Qwen3_5MoeForConditionalGeneration": (11, 11, 10),
}
"""Class of a whole model -> pairs that turn by time, height and width, if config.json is silent."""

_IN_SEQUENCE = (
    "Glm4vForConditionalGeneration",
    "Glm4vMoeForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
)
"""Classes whose sections follow each other; in others they alternate pair by pair."""


def read_axes(whole: Fields, text: Fields, num_pairs: int) -> tuple[int, ...]:
    """Reads by which position each of a head's rotated pairs turns: 0 time, 1 height, 2 width.

    Returns:
        One number for each pair; none if all turn by the position in the sequence.

    Raises:
        ConfigError: the sections do not fit the pairs.
    """
    wrapper = whole.architecture()
    if wrapper not in _SECTIONS:
        return ()
    rope = _rope(text)
    sections = rope.token_ids(_NAME) if rope.has(_NAME) else _SECTIONS[wrapper]
    return _axes(rope, sections, num_pairs, in_sequence=wrapper in _IN_SEQUENCE)


def read_head_axes(head: Fields, num_pairs: int) -> tuple[int, ...]:
    """Reads the same of a head that guesses tokens; none if its config.json has no sections.

    Raises:
        ConfigError: the sections do not fit the pairs.
    """
    rope = _rope(head)
    if not rope.has(_NAME):
        return ()
    in_sequence = not rope.flag("mrope_interleaved")
    return _axes(rope, rope.token_ids(_NAME), num_pairs, in_sequence=in_sequence)


def _rope(text: Fields) -> Fields:
    scaling = text.section("rope_scaling")
    return scaling if scaling.values else text.section("rope_parameters")


def _axes(
    rope: Fields, sections: Sequence[int], num_pairs: int, *, in_sequence: bool
) -> tuple[int, ...]:
    if len(sections) != 3:
        raise rope.error(_NAME, "a list of three counts of pairs")
    if in_sequence:
        if sum(sections) != num_pairs:
            raise rope.error(_NAME, f"a list of three counts with the sum {num_pairs}")
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    axes = [0] * num_pairs
    for axis in (1, 2):
        for pair in range(axis, min(3 * sections[axis], num_pairs), 3):
            axes[pair] = axis
    return tuple(axes)
