"""Decodes checked files into upright RGB pictures. Runs in helper processes only."""

import io
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from services.frontend.errors import InvalidRequestError
from services.frontend.images.files import gif, jpeg, png, webp
from services.frontend.images.files.header import Format, Header
from services.frontend.images.files.stripped import Stripped, damaged

_FILES: dict[Format, tuple[Callable[[bytes], Stripped], Callable[[Any], Image.Image]]] = {
    Format.PNG: (png.strip, PngImageFile),
    Format.JPEG: (jpeg.strip, JpegImageFile),
    Format.WEBP: (webp.strip, WebPImageFile),
    Format.GIF: (gif.strip, GifImageFile),
}
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""EXIF's orientation -> the operation that makes a picture upright."""
_PILLOW_ERRORS = (OSError, SyntaxError, ValueError, EOFError, struct.error, IndexError)
"""Errors of Pillow about damaged files."""
_BAND_PIXELS = 2**20


def decode(data: bytes, header: Header) -> Image.Image:
    """Returns the first frame, upright, in RGB.

    Raises:
        InvalidRequestError: the file is damaged, or takes too much memory.
    """
    strip, open_file = _FILES[header.format]
    stripped = strip(data)
    try:
        image = open_file(io.BytesIO(stripped.data))
        if image.size != (header.width, header.height):
            raise damaged(header.format, "it has several sizes")
        image.load()
        image = to_rgb(image)
    except MemoryError:
        raise InvalidRequestError("the image takes too much memory to decode") from None
    except _PILLOW_ERRORS as error:
        raise damaged(header.format, str(error)[:200] or type(error).__name__) from None
    turn = _TURNS.get(stripped.orientation)
    return image if turn is None else image.transpose(turn)


def to_rgb(image: Image.Image) -> Image.Image:
    """Converts to RGB, with transparency over white, as `convert_to_rgb` of transformers does.

    Gray of 16 bits keeps its upper 8, as its colours do; Pillow's own conversion makes all but the
    darkest of its pixels white.
    """
    if image.mode.startswith("I"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image if image.mode == "RGB" else image.convert("RGB")
    # Band by band: four whole copies with alpha would take 16 bytes a pixel.
    opaque = Image.new("RGB", image.size)
    num_rows = max(1, _BAND_PIXELS // image.width)
    for top in range(0, image.height, num_rows):
        box = (0, top, image.width, min(top + num_rows, image.height))
        band = image.crop(box).convert("RGBA")
        white = Image.new("RGBA", band.size, (255, 255, 255, 255))
        opaque.paste(Image.alpha_composite(white, band).convert("RGB"), box)
    return opaque
