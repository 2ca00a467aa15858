"""Images in bodies: data: URLs and base64 become files, other URLs are fetched later."""

from typing import Literal

from services.frontend.errors import InvalidRequestError
from services.frontend.images.limits import ImageLimits
from services.frontend.images.media.data_url import from_data_url, is_data_url
from services.frontend.pipeline.image_files import ImageFile, image_content
from services.frontend.text.content_parts import Content

Detail = Literal["auto", "low", "high", "original"]
"""How many patches an image has: `low` has few, all others as many as the model allows."""


def image_of_url(url: str, detail: Detail | None, *, field: str) -> Content:
    """Returns an image as a message's content.

    Raises:
        InvalidRequestError: its URL has no image; `field` of the body has it.
    """
    is_low_detail = detail == "low"
    if url and not is_data_url(url):
        return image_content(ImageFile(url=url, is_low_detail=is_low_detail))
    try:
        data = from_data_url(url, max_bytes=ImageLimits().max_bytes)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{field}: {error}", field=field) from None
    if not data:
        raise InvalidRequestError(f"{field}: an image has 0 bytes", field=field)
    return image_content(ImageFile(data=data, is_low_detail=is_low_detail))


def image_of_base64(text: str, *, field: str) -> Content:
    """Returns an image as a message's content; see `image_of_url`."""
    return image_of_url(f"data:image/png;base64,{text}", None, field=field)
