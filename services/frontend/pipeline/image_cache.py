"""Images that were read lately: conversations send theirs again with each turn."""

from collections import OrderedDict
from collections.abc import Hashable

from services.frontend.images.processor import ProcessedImage


class ImageCache:
    """Read images by what was read, least recently used first, within a limit of bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._images: OrderedDict[Hashable, ProcessedImage] = OrderedDict()

    def get(self, key: Hashable) -> ProcessedImage | None:
        """Returns an image; None if it was not read, or long ago."""
        image = self._images.get(key)
        if image is not None:
            self._images.move_to_end(key)
        return image

    def put(self, key: Hashable, image: ProcessedImage) -> None:
        """Keeps an image, unless it is larger than the limit, and lets the oldest go."""
        if len(image.patches) > self._max_bytes or key in self._images:
            return
        self._images[key] = image
        self._num_bytes += len(image.patches)
        while self._num_bytes > self._max_bytes:
            _, oldest = self._images.popitem(last=False)
            self._num_bytes -= len(oldest.patches)
