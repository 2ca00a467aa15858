"""Images on their way to one engine: each travels once while live requests name it."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from protos.engine.v1.engine_pb2 import ImagePart
from services.frontend.engine_client.messages import PlacedImage
from services.frontend.errors import InvalidRequestError

PART_BYTES = 256 * 2**10
"""Most bytes of patches in a message, so that messages of other requests wait little."""


@dataclass(slots=True)
class _HeldImage:
    """An image that the engine holds, or of which it gets the rest."""

    image: PlacedImage
    num_uses: int = 0
    """Live requests that name it."""
    num_sent_bytes: int = 0

    @property
    def is_sent(self) -> bool:
        """Whether the engine has all of it."""
        return self.num_sent_bytes >= len(self.image.patches)

    def next_part(self) -> ImagePart:
        """Takes the next part; the last one has the grid."""
        start, end = self.num_sent_bytes, self.num_sent_bytes + PART_BYTES
        self.num_sent_bytes = end
        patches = bytes(self.image.patches[start:end])
        grid = self.image.grid if self.is_sent else ()
        return ImagePart(digest=self.image.digest, patches=patches, grid=grid)


@dataclass(slots=True, eq=False)
class _Upload:
    """The images of one request."""

    handle: int | None
    """None of a request that has ended while a part of an image was on its way."""
    images: dict[bytes, PlacedImage]
    unsent: deque[bytes] = field(default_factory=deque)
    """Digests of the images that the engine lacks, in order."""


class ImageUploads:
    """Images of one session's requests.

    Requests take turns, one part each. An image is dropped after the last request that names it;
    one whose request ends halfway is sent to its end first. Requests whose images do not fit into
    the engine's memory wait for those before them to end.
    """

    def __init__(self, *, max_bytes: int, on_sent: Callable[[int], None]) -> None:
        """Holds no image yet.

        Args:
            max_bytes: most bytes of patches that the engine holds for the session.
            on_sent: gets the handle of a request whose images the engine has.
        """
        self._max_bytes = max_bytes
        self._on_sent = on_sent
        self._num_bytes = 0
        self._held: dict[bytes, _HeldImage] = {}
        self._unused: set[bytes] = set()
        self._uploads: dict[int, _Upload] = {}
        self._waiting: deque[_Upload] = deque()
        self._sending: deque[_Upload] = deque()

    def add(self, handle: int, images: Sequence[PlacedImage]) -> None:
        """Begins to send the images of a request that the engine lacks.

        Raises:
            InvalidRequestError: the engine cannot hold all of them.
        """
        distinct = {image.digest: image for image in images}
        num_bytes = sum(len(image.patches) for image in distinct.values())
        if num_bytes > self._max_bytes:
            raise InvalidRequestError(
                f"the prompt's images take {num_bytes} bytes of patches; the engine holds at most"
                f" {self._max_bytes}",
                field="prompt",
            )
        upload = self._uploads[handle] = _Upload(handle, distinct)
        self._waiting.append(upload)
        self._begin_waiting()

    def is_waiting(self, handle: int) -> bool:
        """Whether a request waits for room in the engine's memory."""
        return any(upload.handle == handle for upload in self._waiting)

    def release(self, handle: int) -> None:
        """Notes the end of a request; one without images changes nothing."""
        upload = self._uploads.pop(handle, None)
        if upload is None:
            return
        if upload in self._waiting:
            self._waiting.remove(upload)
            self._begin_waiting()
            return
        if upload in self._sending:
            self._sending.remove(upload)
        for digest in upload.images:
            self._unuse(digest)
        self._begin_waiting()

    def take_drops(self) -> list[bytes]:
        """Takes the digests of images to drop; later parts may bring them again."""
        drops = [digest for digest in self._unused if self._held[digest].is_sent]
        for digest in drops:
            self._unused.discard(digest)
            self._forget(digest)
        self._begin_waiting()
        return drops

    def next_part(self) -> ImagePart | None:
        """Takes the next part to send; None if nothing is to be sent now."""
        while self._sending:
            upload = self._sending[0]
            while upload.unsent and self._is_done(upload.unsent[0]):
                upload.unsent.popleft()
            if upload.unsent:
                self._sending.rotate(-1)
                return self._held[upload.unsent[0]].next_part()
            self._sending.popleft()
            if upload.handle is not None:
                self._on_sent(upload.handle)
        return None

    @property
    def has_work(self) -> bool:
        """Whether there are parts to take or images to drop."""
        return bool(self._sending or self._unused)

    def _begin_waiting(self) -> None:
        """Begins the requests that fit, in their order."""
        while self._waiting:
            upload = self._waiting[0]
            new = [image for digest, image in upload.images.items() if digest not in self._held]
            num_bytes = sum(len(image.patches) for image in new)
            if self._num_bytes + num_bytes > self._max_bytes:
                return
            self._waiting.popleft()
            self._num_bytes += num_bytes
            self._held |= {image.digest: _HeldImage(image) for image in new}
            for digest in upload.images:
                self._held[digest].num_uses += 1
                self._unused.discard(digest)
            upload.unsent.extend(upload.images)
            self._sending.append(upload)

    def _is_done(self, digest: bytes) -> bool:
        """Whether the engine has all of an image, or has had it."""
        held = self._held.get(digest)
        return held is None or held.is_sent

    def _unuse(self, digest: bytes) -> None:
        held = self._held[digest]
        held.num_uses -= 1
        if held.num_uses:
            return
        if not held.num_sent_bytes:
            self._forget(digest)
            return
        self._unused.add(digest)
        if not held.is_sent:
            self._sending.append(_Upload(None, {}, deque([digest])))

    def _forget(self, digest: bytes) -> None:
        self._num_bytes -= len(self._held.pop(digest).image.patches)
