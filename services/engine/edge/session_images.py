"""The images that a frontend has sent on its session."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass

from protos.engine.v1.engine_pb2 import DropImages, ImagePart
from services.engine.errors import InvalidRequestError
from services.engine.patch_memory import PatchMemory
from services.engine.prompt_image import EncoderImage

DIGEST_BYTES = 32
MAX_PART_BYTES = 2**18
MAX_GRID = 8
"""Most numbers in a grid."""


@dataclass(slots=True)
class _Bytes:
    """A number of bytes, which images lower when they are gone."""

    count: int = 0

    def free(self, num_bytes: int) -> None:
        self.count -= num_bytes


class SessionImages:
    """Puts images together from their parts, and holds them until they are dropped.

    Bytes of the images that it holds are bounded, unfinished ones included. Dropped ones that
    requests still have may take as many again.
    """

    def __init__(
        self,
        max_bytes: int,
        check: Callable[[EncoderImage], None] = lambda image: None,
        memory: PatchMemory | None = None,
    ) -> None:
        """Starts without images.

        Args:
            max_bytes: of patches; 0 for a model that sees no images.
            check: raises InvalidRequestError if the encoder cannot take a finished image.
            memory: takes the patches of finished images; None keeps them in this process alone.
        """
        self._max_bytes = max_bytes
        self._check = check
        self._memory = memory
        self._num_held_bytes = 0
        self._all = _Bytes()  # apart, as what an image calls when it is gone lives until then
        self._parts: dict[bytes, list[bytes]] = {}
        self._images: dict[bytes, EncoderImage] = {}

    def add(self, part: ImagePart) -> None:
        """Takes the next part of an image.

        Raises:
            InvalidRequestError: it breaks the protocol, which ends the session.
        """
        digest = part.digest
        if not self._max_bytes:
            raise InvalidRequestError("image_part is for models that see images")
        if len(digest) != DIGEST_BYTES:
            raise InvalidRequestError(f"an image's digest has {len(digest)} bytes, not 32")
        if len(part.patches) > MAX_PART_BYTES or len(part.grid) > MAX_GRID:
            raise InvalidRequestError(
                f"image_part has {len(part.patches)} bytes and a grid of {len(part.grid)} numbers; "
                f"the limits are {MAX_PART_BYTES} and {MAX_GRID}"
            )
        if digest in self._images:
            raise InvalidRequestError("image_part is of an image that the session holds")
        held, total = (each + len(part.patches) for each in (self._num_held_bytes, self._all.count))
        if held > self._max_bytes or total > 2 * self._max_bytes:
            raise InvalidRequestError(
                f"the session's images have more than {self._max_bytes} bytes"
            )
        self._num_held_bytes, self._all.count = held, total
        parts = self._parts.setdefault(digest, [])
        parts.append(part.patches)
        if not part.grid:
            if not part.patches:
                raise InvalidRequestError("image_part is empty and not the last of its image")
            return
        del self._parts[digest]
        image = EncoderImage.joined(
            parts, digest=digest, grid=tuple(part.grid), memory=self._memory
        )
        weakref.finalize(image, self._all.free, len(image.patches))
        self._check(image)
        self._images[digest] = image

    def drop(self, order: DropImages) -> None:
        """Forgets images; requests keep theirs."""
        for digest in order.digests:
            image = self._images.pop(digest, None)
            if image is not None:
                self._num_held_bytes -= len(image.patches)
                continue
            num_bytes = sum(map(len, self._parts.pop(digest, ())))
            self._num_held_bytes -= num_bytes
            self._all.free(num_bytes)

    def find(self, digest: bytes) -> EncoderImage:
        """Returns an image.

        Raises:
            InvalidRequestError: the session does not hold it.
        """
        image = self._images.get(digest)
        if image is None:
            raise InvalidRequestError(
                f"image {digest[:8].hex()} was not sent on this session, or was dropped",
                field="images",
            )
        return image
