"""The images of rows, encoded where a replay reads some that no recorded step encodes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from services.engine.batch import (
    BatchDescriptor,
    EncodedImage,
    RowAssignment,
    RowImage,
    StepImage,
    pack_int32,
    read_int32,
)
from services.engine.config.images import pages_of
from services.engine.limits import StepLimits
from services.engine.replay.recording import ReplayError
from services.engine.replay.rows_alone import chunk_of


class ImageContent:
    """Follows which pages of the table of vectors hold what the recording expects there."""

    def __init__(self, limits: StepLimits, patches: Mapping[bytes, bytes]) -> None:
        """Starts without rows, with nothing encoded.

        patches: of images, by digest; those of a row are there when it is assigned.
        """
        self.limits = limits
        self._patches = patches
        self._rows: dict[int, Sequence[RowImage]] = {}
        self._encoded: set[bytes] = set()

    def assign(self, assignments: Iterable[RowAssignment]) -> None:
        """Takes the images of new rows."""
        for each in assignments:
            self._rows[each.row] = each.images

    def completed(self, descriptor: BatchDescriptor) -> BatchDescriptor:
        """Returns a recorded step that also encodes what it reads and no step has encoded.

        Images whose patches were in the engine's memory are encoded when a step first reads them.

        Raises:
            ReplayError: the recording does not have such an image.
        """
        self.assign(descriptor.row_assignments)
        placed = {each.pages for each in descriptor.encoded_images if each.HasField("place")}
        self._encoded -= placed
        self._encoded |= {each.pages for each in descriptor.encoded_images} - placed
        missing = {
            each.pages: each for each in descriptor.images if each.pages not in self._encoded
        }
        if not missing and not placed:
            return descriptor
        completed = BatchDescriptor()
        completed.CopyFrom(descriptor)
        del completed.encoded_images[:]
        completed.encoded_images.extend(
            each for each in descriptor.encoded_images if each.pages not in placed
        )
        row_ids = read_int32(descriptor.attn_metadata.row_ids)
        for pages, each in missing.items():
            row = int(row_ids[each.request])
            completed.encoded_images.append(self._order(row, each.image, pages))
        self._encoded |= missing.keys()
        return completed

    def chunks(self, row: int, tokens: range) -> Iterator[tuple[BatchDescriptor, tuple[int, int]]]:
        """Yields steps that compute tokens of a row, and which; each shows at most one image.

        They encode it into the first pages of the table.

        Raises:
            ReplayError: the recording does not have an image.
        """
        start, images = tokens.start, list(enumerate(self._rows.get(row, ())))
        while start < tokens.stop:
            end = min(start + self.limits.max_num_batched_tokens, tokens.stop)
            shown = next((item for item in images if _end(item[1]) > start), None)
            if shown is not None and shown[1].offset >= end:
                shown = None
            if shown is not None:
                end = self._end_of_chunk(start, end, shown[1])
            chunk = chunk_of(row, start, end, self.limits)
            if shown is not None and shown[1].offset < end:
                pages = pack_int32(
                    range(min(pages_of(shown[1].num_tokens), self.limits.num_encoder_pages))
                )
                chunk.encoded_images.append(self._order(row, shown[0], pages))
                chunk.images.append(StepImage(request=0, image=shown[0], pages=pages))
            yield chunk, (start, min(end, tokens.stop))
            start = end

    def _end_of_chunk(self, start: int, end: int, image: RowImage) -> int:
        """Returns where a chunk ends: in the image, after it, or before one that is computed whole.

        Tokens after `end` may be computed, so that an image is whole; their steps repeat it.
        """
        if not self.limits.max_whole_tokens:
            return min(end, _end(image))
        if _end(image) <= end or image.offset <= start:
            return _end(image)
        return image.offset

    def _order(self, row: int, number: int, pages: bytes) -> EncodedImage:
        image = self._rows[row][number]
        patches = self._patches.get(image.digest)
        if patches is None:
            raise ReplayError(
                f"row {row} shows an image that was encoded before the recording began, and that "
                "the recording does not have"
            )
        return EncodedImage(patches=patches, grid=image.grid, pages=pages)


def _end(image: RowImage) -> int:
    return image.offset + image.num_tokens
