"""Images of the fake worker: the first number of an image's grid says what it shows."""

from collections.abc import Sequence

import numpy as np

from services.engine.batch import BatchDescriptor, EncodedImage, RowAssignment, read_int32
from services.engine.config.images import PAGE_VECTORS
from services.engine.prompt_image import EncoderImage, PromptImage
from tests.support.fake_model import require

IMAGE_TOKEN = 999
_GARBAGE = (-1, -1)


def image_at(offset: int, num_vectors: int, shown: int) -> PromptImage:
    """Returns an image whose tokens are all image tokens."""
    image = EncoderImage(
        digest=f"{shown} {num_vectors}".encode().ljust(32),
        patches=bytes([shown]) * num_vectors,
        grid=(shown, num_vectors),
    )
    return PromptImage(image=image, offset=offset, num_tokens=num_vectors, num_vectors=num_vectors)


def meaning(shown: int, vector: int) -> int:
    """Returns what a vector stands for, as a token that no prompt has."""
    return 10_000 + 100 * shown + vector


def meant(token_ids: Sequence[int], images: Sequence[PromptImage]) -> list[int]:
    """Returns a prompt with meanings in the place of image tokens."""
    result = list(token_ids)
    for each in images:
        for vector in range(each.num_vectors):
            result[each.offset + vector] = meaning(each.image.grid[0], vector)
    return result


class FakeImages:
    """Tables of encoded images and of the rows that show them."""

    def __init__(self) -> None:
        self._table: dict[int, tuple[int, int]] = {}
        self._rows: dict[int, dict[int, tuple[int, int, int]]] = {}

    def assign(self, assignment: RowAssignment) -> None:
        """Gives a row the images of its prompt."""
        self._rows[assignment.row] = {
            each.offset + vector: (number, each.grid[0], vector)
            for number, each in enumerate(assignment.images)
            for vector in range(each.num_tokens)
        }

    def meaning(self, row: int, position: int, token_id: int) -> int:
        """Returns what a row's token stands for."""
        found = self._rows.get(row, {}).get(position)
        return token_id if found is None else meaning(*found[1:])

    def encode(self, images: Sequence[EncodedImage]) -> None:
        """Fills pages; no step writes one twice."""
        pages = [page for each in images for page in read_int32(each.pages).tolist()]
        require(len(set(pages)) == len(pages), "a page is written twice")
        for each in images:
            for number, page in enumerate(read_int32(each.pages).tolist()):
                self._table[page] = (each.grid[0], number)

    def spoil(self, images: Sequence[EncodedImage]) -> None:
        """Makes the pages of a failed step wrong."""
        for each in images:
            self._table |= dict.fromkeys(read_int32(each.pages).tolist(), _GARBAGE)

    def check_reads(
        self, descriptor: BatchDescriptor, spans: Sequence[tuple[int, int, int]]
    ) -> None:
        """Requires that each image token of a step finds its own vector."""
        pages = {(each.request, each.image): read_int32(each.pages) for each in descriptor.images}
        for request, (row, start, end) in enumerate(spans):
            places = self._rows.get(row, {})
            for position in range(start, end):
                if position not in places:
                    continue
                image, shown, vector = places[position]
                own = pages.get((request, image), np.empty(0, np.int32))
                number = vector // PAGE_VECTORS
                require(number < len(own), f"row {row} has no vector at {position}")
                held = self._table.get(int(own[number]))
                require(held == (shown, number), f"row {row} would read {held} at {position}")
