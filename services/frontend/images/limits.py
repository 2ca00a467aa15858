"""Limits of reading an image."""

from dataclasses import dataclass

MEBIBYTE = 2**20
_IDLE_MEMORY_BYTES = 384 * MEBIBYTE
"""Address space of a helper before an image, 160 MiB, and the image's file and patches."""
_MEMORY_BYTES_PER_PIXEL = 20
"""Decoding and converting to RGB take 8 in most formats, 12 in progressive CMYK, 16 in WebP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """The most that an image may take."""

    max_bytes: int = 20 * MEBIBYTE
    """Bytes of a file. A JPEG photograph of 50 megapixels has about 15 MiB."""
    max_pixels: int = 64_000_000
    """Width times height, as in the file's header. 8000 x 8000 pixels, also above the 50 megapixels
    of telephones; decoding takes up to 2 s and `memory_bytes`."""
    cpu_s: int = 15
    """Processor time. The slowest images within the other limits take a third of it."""
    timeout_s: float = 60.0
    """Wall-clock time in a helper process, generous for busy machines."""

    @property
    def memory_bytes(self) -> int:
        """Address space of a helper process."""
        return _IDLE_MEMORY_BYTES + _MEMORY_BYTES_PER_PIXEL * self.max_pixels
