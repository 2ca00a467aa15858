"""Images in prompts, for models that see them."""

from pydantic import Field

from services.engine.config.section import ConfigSection

PAGE_VECTORS = 16
"""Vectors in a page of the table of encoded images."""


def pages_of(num_vectors: int) -> int:
    """Returns the pages that an image takes."""
    return -(-num_vectors // PAGE_VECTORS)


class ImagesConfig(ConfigSection):
    """Images in prompts, for models that see them."""

    language_model_only: bool = False
    """Leave the image encoder out: the model takes text alone, and all memory is its."""
    encoder_cache_tokens: int = Field(default=16_384, ge=256, le=2**20)
    """Tokens of images that stay encoded in the device's memory, in requests that need them and
    after; also the most of one image."""
    max_encoder_tokens: int = Field(default=2048, ge=1, le=2**20)
    """Most tokens of images that a step encodes, while requests that decode wait; in steps that
    max_num_mixed_tokens shortens, at most as many as query tokens. An image with more is encoded
    alone."""

    @property
    def max_image_tokens(self) -> int:
        """Most tokens of an image; 0 if the model is served for text alone."""
        return 0 if self.language_model_only else self.encoder_cache_tokens
