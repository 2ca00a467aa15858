"""The images that a model's encoder takes, for frontends and for checks of their messages."""

import json
from dataclasses import dataclass
from pathlib import Path

import structlog

from models.config import CONFIG_FILE, ModelConfig
from models.config_sections.fields import Fields
from models.config_sections.vision import VisionConfig
from services.engine.checkpoint.image_settings import image_settings
from services.engine.errors import InvalidRequestError
from services.engine.prompt_image import EncoderImage

log = structlog.get_logger()

SESSION_IMAGES = 16
"""Images of the largest size that a session may hold at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInput:
    """The images that a model takes.

    kind, settings: of the processor that makes patches, for frontends; settings are JSON.
    token_id: the token that stands for a vector. template_token_id: the token that chat templates
        write for an image; text_around: text before and after it.
    max_vectors: of an image. max_patches: of an image. max_bytes: of all patches of a session.
    has_mrope: whether positions are those of rows and columns; then all tokens stand for vectors.
    """

    kind: str
    settings: str
    token_id: int
    template_token_id: int
    text_around: str
    max_vectors: int
    max_patches: int
    max_bytes: int
    has_mrope: bool
    vision: VisionConfig

    @classmethod
    def of(cls, config: ModelConfig, folder: Path, *, max_vectors: int) -> "ImageInput | None":
        """Returns the images of a model; None without an encoder or a file of its processor.

        Raises:
            ConfigError: a file is wrong, or the processor is unknown.
        """
        vision = config.vision
        if vision is None:
            return None
        found = image_settings(folder, dict(Fields.read(folder / CONFIG_FILE).values))
        if found is None:
            log.warning("images_not_served", reason=f"{folder} describes no image processor")
            return None
        max_patches = max_vectors * vision.merge**2
        return cls(
            kind=found.kind,
            settings=json.dumps(found.settings, sort_keys=True),
            token_id=found.image_token_id,
            template_token_id=found.template_token_id,
            text_around=found.text_around,
            max_vectors=max_vectors,
            max_patches=max_patches,
            max_bytes=SESSION_IMAGES * max_patches * vision.patch_bytes,
            has_mrope=bool(config.rope.axes),
            vision=vision,
        )

    def num_vectors(self, grid: tuple[int, ...]) -> int:
        """Returns the vectors of an image whose grid was checked."""
        return self.vision.num_vectors(grid)

    def check(self, image: EncoderImage) -> None:
        """Checks an image before it may reach the worker.

        Raises:
            InvalidRequestError: its grid is impossible, it has other patches than its grid says, or
                too many.
        """
        vision = self.vision
        try:
            vision.check_grid(image.grid)
        except ValueError as error:
            raise InvalidRequestError(f"an image's grid is {image.grid}: {error}") from error
        count, vectors = vision.num_patches(image.grid), vision.num_vectors(image.grid)
        if count * vision.patch_bytes != len(image.patches):
            raise InvalidRequestError(
                f"an image of {count} patches has {len(image.patches)} bytes; each patch has "
                f"{vision.patch_bytes}"
            )
        if vectors > self.max_vectors:
            raise InvalidRequestError(
                f"an image has {vectors} vectors; the limit is {self.max_vectors}"
            )
