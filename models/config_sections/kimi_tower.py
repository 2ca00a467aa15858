"""The encoder of images of Kimi K2.5 to 2.7 in config.json."""

from dataclasses import dataclass

from models.config_sections.fields import Fields
from models.config_sections.vision import (
    HALF,
    TowerDefaults,
    VisionConfig,
    read_colours,
    read_shape,
)

_NAMES = {
    "init_pos_emb_height": "pos_emb_height",
    "init_pos_emb_width": "pos_emb_width",
    "vt_hidden_size": "hidden_size",
    "vt_intermediate_size": "intermediate_size",
    "vt_num_attention_heads": "num_attention_heads",
    "vt_num_hidden_layers": "num_hidden_layers",
}
"""Name of a field in published checkpoints -> in files of transformers."""
_DEFAULTS = TowerDefaults(163605, 27, 1152, 4304, 16, 14, ("gelu_pytorch_tanh",), head_multiple=4)


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiVisionConfig(VisionConfig):
    """Shape of MoonViT's tower.

    num_positions: learned positions, height and width. norm_eps: of the projector.
    """

    rope_theta: float
    num_positions: tuple[int, int]
    norm_eps: float


def read_kimi(whole: Fields, text: Fields, fields: Fields) -> VisionConfig:
    """Reads the tower from the whole, its text and this part."""
    fields = fields.renamed(_NAMES)
    sides = fields.values.get("merge_kernel_size", [2, 2])
    is_square = sides in ([1, 1], [2, 2], [3, 3], [4, 4])
    if not is_square or any(type(side) is not int for side in sides):
        raise fields.error("merge_kernel_size", "one small number twice")
    eps = whole.number("projection_layer_norm_eps", fields.number("projector_ln_eps", 1e-5))
    return KimiVisionConfig(
        **read_shape(whole, text, fields, _DEFAULTS),
        merge=sides[0],
        colours=read_colours(whole, HALF, HALF),
        rope_theta=fields.section("rope_parameters").number("rope_theta", 10_000.0),
        num_positions=(fields.count("pos_emb_height", 64), fields.count("pos_emb_width", 64)),
        norm_eps=eps,
    )
