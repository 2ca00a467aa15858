"""The parts that read images for the pipeline, and their limits."""

from collections.abc import Callable
from dataclasses import dataclass, field

from services.frontend.engine_client.messages import ModelInfo
from services.frontend.images.limits import ImageLimits
from services.frontend.images.media.fetcher import MediaFetcher
from services.frontend.images.reader import ImageReader

OpenReader = Callable[[ModelInfo], ImageReader]
"""Returns the reader of a model that sees images; raises ValueError if its settings cannot be
followed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptImageLimits:
    """Limits of images in prompts."""

    max_per_request: int = 64
    max_pixels_per_request: int = 256_000_000
    image: ImageLimits = field(default_factory=ImageLimits)
    """Limits of one image."""
    max_held_bytes: int = 2**31
    """Files and patches of live requests; an account may have a quarter."""
    max_cached_bytes: int = 2**28
    """Patches of images that were read lately."""


def open_reader(
    info: ModelInfo, *, num_processes: int = 1, limits: ImageLimits | None = None
) -> ImageReader:
    """Returns the reader of a model's images; for `num_processes` and `limits` see there.

    Raises:
        ValueError: the model's settings cannot be followed.
    """
    processor = info.image_processor
    return ImageReader(
        processor.kind,
        processor.settings,
        image_token_id=processor.image_token_id,
        max_patches=processor.max_patches,
        num_processes=num_processes,
        limits=limits,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageParts:
    """The parts that read images, and their limits."""

    limits: PromptImageLimits = field(default_factory=PromptImageLimits)
    open_reader: OpenReader = open_reader
    fetcher: MediaFetcher | None = None
    """None fetches no URLs."""
