"""The encoders of Gemma 3 and Gemma 4 in config.json."""

from dataclasses import dataclass
from math import isqrt

from models.config_sections.fields import Fields
from models.config_sections.vision import (
    HALF,
    ColourScale,
    MutualLayers,
    OneTileVisionConfig,
    TowerDefaults,
    VisionConfig,
    processor_fields,
    read_colours,
    read_image_token,
    read_shape,
)

NUM_MARKS = 4
"""Tokens around the vectors of an image: a start, an end, and line breaks before and after."""

_ACTIVATIONS = ("gelu_pytorch_tanh",)
_GEMMA_3 = TowerDefaults(262144, 12, 768, 3072, 12, 16, _ACTIVATIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3VisionConfig(OneTileVisionConfig):
    """Shape of SigLIP's tower in Gemma 3, which sees images as one tile.

    merge: patches on each side of the square whose mean becomes one vector.
    """

    @property
    def max_whole_tokens(self) -> int:
        """Most tokens of an image that one step computes."""
        return (self.side // self.merge) ** 2 + NUM_MARKS


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4ImageConfig(VisionConfig):
    """Shape of what sees images in Gemma 4: of any shape, up to a number of vectors.

    max_vectors: of an image. num_positions: rows and columns that have learned positions.
    """

    max_vectors: int
    num_positions: int
    norm_eps: float

    def check_grid(self, grid: tuple[int, ...]) -> None:
        """Raises ValueError unless a grid is one of an image: its height and width in patches."""
        VisionConfig.check_grid(self, grid)
        if max(grid) > self.num_positions:
            raise ValueError(f"it must be at most {self.num_positions}")
        if self.num_vectors(grid) > self.max_vectors:
            raise ValueError(f"an image has at most {self.max_vectors} vectors")

    @property
    def max_whole_tokens(self) -> int:
        """Most tokens of an image that one step computes."""
        return 0 if self.mutual_layers is MutualLayers.NONE else self.max_vectors + NUM_MARKS

    def largest_grid(self, max_vectors: int) -> tuple[int, ...]:
        """Returns the grid of an image of about as many vectors, and no more."""
        side = isqrt(min(max_vectors, self.max_vectors)) * self.merge
        side = min(side, self.num_positions // self.merge * self.merge)
        return side, side


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4VisionConfig(Gemma4ImageConfig):
    """Shape of the tower of Gemma 4.

    head_size: elements of a head.
    has_clips: whether inputs and outputs of linear layers are clipped.
    has_scales: whether vectors are shifted and scaled before they are projected.
    """

    head_size: int
    rope_theta: float
    has_clips: bool
    has_scales: bool

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return self.head_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4UnifiedVisionConfig(Gemma4ImageConfig):
    """Shape of what sees images in Gemma 4 Unified: no layers, each large patch is a vector."""


def read_gemma3(whole: Fields, text: Fields, fields: Fields) -> Gemma3VisionConfig:
    """Reads the encoder from the whole model, its text and this part."""
    fields.choice("model_type", ("siglip_vision_model",), "siglip_vision_model")
    shape = read_shape(whole, text, fields, _GEMMA_3)
    side = fields.count("image_size", 224) // shape["patch_size"]
    vectors_per_side = int(whole.count("mm_tokens_per_image", 256) ** 0.5)
    if not side or side % vectors_per_side:
        raise whole.error("mm_tokens_per_image", f"the square of a divisor of {side} patches")
    return Gemma3VisionConfig(
        **shape,
        merge=side // vectors_per_side,
        colours=read_colours(whole, HALF, HALF),
        side=side,
        norm_eps=fields.number("layer_norm_eps", 1e-6),
        has_bias=False,
        mutual_layers=MutualLayers.ALL,
    )


def read_gemma4_vision(whole: Fields, text: Fields, fields: Fields) -> Gemma4VisionConfig:
    """Reads the encoder from the whole model, its text and this part."""
    hidden_size = fields.count("hidden_size", 768)
    num_heads = fields.count("num_attention_heads", 12)
    if fields.count("num_key_value_heads", num_heads) != num_heads:
        raise fields.error("num_key_value_heads", f"{num_heads}, as many as heads of queries")
    if fields.flag("attention_bias"):
        raise fields.error("attention_bias", "false")
    head_size = fields.count("head_dim", 64)
    if head_size % 4:
        raise fields.error("head_dim", "a multiple of 4, as rows and columns turn pairs")
    colours = read_colours(whole, (0.0,) * 3, (1.0,) * 3, normalizes=False)
    return Gemma4VisionConfig(
        image_token_id=read_image_token(whole, 258880),
        num_layers=fields.count("num_hidden_layers", 16),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size", 3072),
        num_heads=num_heads,
        head_size=head_size,
        out_size=text.count("hidden_size"),
        patch_size=fields.count("patch_size", 16),
        merge=fields.count("pooling_kernel_size", 3),
        hidden_act=fields.choice("hidden_activation", _ACTIVATIONS, "gelu_pytorch_tanh"),
        # The tower sees values from -1 to 1.
        colours=ColourScale(
            factor=colours.factor,
            mean=tuple(m + 0.5 * s for m, s in zip(colours.mean, colours.std, strict=True)),
            std=tuple(0.5 * s for s in colours.std),
        ),
        mutual_layers=_mutual_layers(text),
        max_vectors=_max_vectors(whole),
        num_positions=fields.count("position_embedding_size", 10_240),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=fields.section("rope_parameters").number("rope_theta", 100.0),
        has_clips=fields.flag("use_clipped_linears"),
        has_scales=fields.flag("standardize"),
    )


def read_gemma4_unified(whole: Fields, text: Fields, fields: Fields) -> Gemma4UnifiedVisionConfig:
    """Reads what sees images from the whole model, its text and this part."""
    hidden_size = fields.count("mm_embed_dim", 3840)
    if fields.count("output_proj_dims", 3840) != hidden_size:
        raise fields.error("output_proj_dims", f"{hidden_size}, as mm_embed_dim")
    return Gemma4UnifiedVisionConfig(
        image_token_id=read_image_token(whole, 258880),
        num_layers=0,
        hidden_size=hidden_size,
        intermediate_size=0,
        num_heads=1,
        out_size=text.count("hidden_size"),
        patch_size=fields.count("patch_size", 16) * fields.count("pooling_kernel_size", 3),
        merge=1,
        hidden_act="",
        colours=read_colours(whole, (0.0,) * 3, (1.0,) * 3, normalizes=False),
        mutual_layers=_mutual_layers(text),
        max_vectors=_max_vectors(whole),
        num_positions=fields.count("mm_posemb_size", 1120),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
    )


def _mutual_layers(text: Fields) -> MutualLayers:
    is_mutual = text.values.get("use_bidirectional_attention") == "vision"
    return MutualLayers.WINDOWS if is_mutual else MutualLayers.NONE


def _max_vectors(whole: Fields) -> int:
    return processor_fields(whole.file.parent).count("max_soft_tokens", 280)
