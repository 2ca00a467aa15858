"""Chooses the images that steps encode, and bounds prompts by what is encoded."""

from collections.abc import Iterator, Sequence

from services.engine.batch import EncodedImage, pack_int32
from services.engine.prompt_image import EncoderImage, PromptImage
from services.engine.request import Request
from services.engine.scheduler.encoder_cache import EncoderCache
from services.engine.scheduler.stats import SchedulerCounts


class ImagePlan:
    """Encodes images just before their tokens are computed, a bounded number in each step.

    A short step, beside decodes, encodes images whose tokens later steps compute: both at once
    would take the time of two steps.

    A request keeps an image from the step that first needs it to the one that passes its last
    token. It never waits for an image while it keeps another that it has not passed, so requests
    cannot wait for each other in a circle.
    """

    def __init__(
        self,
        cache: EncoderCache,
        max_step_vectors: int,
        counts: SchedulerCounts,
        *,
        computes_whole: bool = False,
    ) -> None:
        """Starts without requests.

        Args:
            cache: the worker's table; the largest image fits.
            max_step_vectors: most vectors that a step encodes; a larger image is encoded alone.
            counts: takes the images that were encoded and found.
            computes_whole: whether no step may end inside of an image.
        """
        self.computes_whole = computes_whole
        self._cache = cache
        self._max_step_vectors = max_step_vectors
        self._num_step_vectors = 0
        self._most_short: int | None = None
        self._new: set[bytes] = set()
        """Digests of images that the step encodes."""
        self._kept: dict[Request, dict[int, list[int]]] = {}
        self._passed: list[tuple[Request, int]] = []
        self._ordered: list[tuple[EncoderImage, list[int]]] = []
        self._counts = counts

    def begin_step(self, *, most_short: int | None = None) -> None:
        """Begins to plan a step.

        most_short: tokens of a step that is short, as requests decode in it, and as many vectors;
            None for another step.
        """
        self._most_short = most_short
        self._num_step_vectors = 0
        self._new.clear()

    @property
    def are_awaited(self) -> bool:
        """Whether requests wait for a later step, as the one being planned encodes their images."""
        return self._most_short is not None and bool(self._new)

    def bound(self, request: Request, start: int, q_len: int, most: int) -> int:
        """Returns how many of a request's next tokens can be computed; keeps their images.

        Args:
            request: whose tokens.
            start: position of the first of them.
            q_len: tokens that the step would compute.
            most: tokens that it can compute, to the end of an image that is computed whole.
        """
        end = start + q_len
        for number, each in enumerate(request.images):
            if not each.is_at(start, end):
                continue
            is_cut = self.computes_whole and each.end > end
            if is_cut and each.end - start > most:
                return max(each.offset - start, 0)
            if not self._keep(request, number, each):
                return max(each.offset - start, 0)
            end = each.end if is_cut else end
        return end - start

    def used(self, request: Request, start: int, end: int) -> Iterator[tuple[int, list[int]]]:
        """Yields number and pages of the images with tokens at positions from start to end - 1.

        Images that end there are given up once the step is ordered.
        """
        for number, each in enumerate(request.images):
            if each.is_at(start, end):
                yield number, self._kept[request][number]
                if each.end <= end:
                    self._passed.append((request, number))

    def take_ordered(self) -> list[tuple[EncoderImage, list[int]]]:
        """Returns the images that the step sent now encodes, with their pages."""
        for request, number in self._passed:
            if self._kept.get(request, {}).pop(number, None) is not None:
                self._cache.release(request.images[number].image.digest)
            if not self._kept.get(request, True):
                del self._kept[request]
        self._passed.clear()
        # A request that was preempted while the step was planned leaves its images to others.
        ordered = [each for each in self._ordered if self._cache.holds(each[0].digest, each[1])]
        self._ordered.clear()
        self._counts.num_encoded_images += len(ordered)
        return ordered

    def drop(self, request: Request) -> None:
        """Gives up what a request keeps."""
        for number in self._kept.pop(request, {}):
            self._cache.release(request.images[number].image.digest)

    def forget(self) -> None:
        """Forgets all encoded images: later steps encode them again."""
        self._kept.clear()
        self._passed.clear()
        self._ordered.clear()
        self._cache.forget()

    def _keep(self, request: Request, number: int, image: PromptImage) -> bool:
        """Keeps an image for a request; returns whether it is encoded or the step will do it."""
        digest = image.image.digest
        if number not in self._kept.get(request, {}):
            pages = self._cache.find(digest)
            if pages is None:
                pages = self._encode(image)
            elif self._cache.has_other_readers(digest):
                self._counts.num_found_images += 1
            if pages is None:
                return False
            self._kept.setdefault(request, {})[number] = pages
        if self._most_short is not None and digest in self._new:
            return False
        self._cache.note_read(digest)
        return True

    def _encode(self, image: PromptImage) -> list[int] | None:
        """Orders an image for a request; returns its pages, None if the step has no room for it."""
        most, digest = self._max_step_vectors, image.image.digest
        if self._most_short is not None:
            most = min(most, self._most_short)
        num_vectors = self._num_step_vectors + image.num_vectors
        if self._num_step_vectors and num_vectors > most:
            return None
        pages = self._cache.take(digest, image.num_vectors)
        if pages is not None:
            self._num_step_vectors = num_vectors
            self._ordered.append((image.image, pages))
            self._new.add(digest)
        return pages


def encoding_order(image: EncoderImage, pages: Sequence[int]) -> EncodedImage:
    """Returns the order to encode an image into pages of the worker's table."""
    order = EncodedImage(grid=image.grid, pages=pack_int32(pages))
    if image.place is None:
        order.patches = bytes(image.patches)
    else:
        order.place.begin, order.place.num_bytes = image.place, len(image.patches)
    return order
