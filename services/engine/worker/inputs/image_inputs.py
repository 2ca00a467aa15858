"""The worker's table of encoded images, and what the tokens of a step take from it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from models.config import ModelConfig
from models.config_sections.vision import MutualLayers
from models.forward_context import ImageMetadata
from models.vision.rope_positions import image_rope_positions
from services.engine.batch import EncodedImage, RowAssignment, read_int32
from services.engine.config.images import PAGE_VECTORS
from services.engine.limits import StepLimits
from services.engine.worker.inputs.batch import Batch
from services.engine.worker.inputs.checks import is_below, require
from services.engine.worker.inputs.transfer import to_device

_NONE = -1
"""Marks a token that stands for no vector, or whose position is that of plain text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _RowImages:
    """The images of a row's prompt.

    end: position after the last token of all images. tokens: of each, positions with its vectors.
    rope_positions: [3, end] int64; None without M-RoPE.
    """

    end: int
    tokens: Sequence[npt.NDArray[np.int64]]
    rope_positions: npt.NDArray[np.int64] | None


class ImageInputs:
    """The table of vectors and, at constant addresses, what the tokens of a step read.

    rows: [pages * PAGE_VECTORS, features], vectors of encoded images; steps name pages of it.
    """

    def __init__(
        self,
        config: ModelConfig,
        limits: StepLimits,
        *,
        num_features: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Starts without images.

        Args:
            config: of a model that sees images.
            limits: the worker's.
            num_features: of a vector; 0 on a stage without an encoder.
            dtype: of the vectors.
            device: of the table.
        """
        vision = config.vision
        assert vision is not None, "the model sees images"
        self._image_token_id, self._sides = vision.image_token_id, vision.sides
        self._has_mrope = bool(config.rope.axes)
        self.sees_later = vision.mutual_layers is not MutualLayers.NONE
        """Whether tokens of an image attend to later ones of it."""
        self._only_windows = vision.mutual_layers is MutualLayers.WINDOWS
        self._key_ends: Tensor | None = None
        self._builds_kernels = False
        self._device = device
        self._num_pages = limits.num_encoder_pages
        num_rows = self._num_pages * PAGE_VECTORS if num_features else 0
        self.rows = torch.empty(num_rows, num_features, dtype=dtype, device=device)
        num_tokens = limits.max_num_batched_tokens
        # Of query tokens, and of their successors, which draft layers embed.
        self._index = torch.full((2, num_tokens), _NONE, dtype=torch.int32, device=device)
        self._own_positions = torch.full((3, num_tokens), _NONE, device=device)
        self._rope_positions = torch.zeros(3, num_tokens, dtype=torch.int64, device=device)
        # One more than requests, for the dummy row.
        self._deltas = torch.zeros(limits.max_num_seqs + 1, dtype=torch.int64, device=device)
        self._host_deltas = np.zeros(limits.max_num_seqs + 1, np.int64)
        self._row_images: dict[int, _RowImages] = {}
        # Of each row, the position after the last token of its images; 0 without any.
        self._ends = np.zeros(limits.max_num_seqs + 1, np.int64)
        self._num_written = 0

    @property
    def fixed(self) -> dict[str, Tensor]:
        """The tensors that a whole graph reads, by name."""
        return {
            "image_rows": self.rows,
            "image_index": self._index,
            "image_positions": self._own_positions,
            "rope_deltas": self._deltas,
        }

    def assign(self, assignments: Sequence[RowAssignment]) -> None:
        """Gives rows to new requests with the images of their prompts."""
        changed = set()
        for assignment in assignments:
            delta = self._ends[assignment.row] = 0
            self._row_images.pop(assignment.row, None)
            if assignment.images:
                images, delta = self._read_row(assignment)
                self._row_images[assignment.row] = images
                self._ends[assignment.row] = images.end
            if delta != self._host_deltas[assignment.row]:
                self._host_deltas[assignment.row] = delta
                changed.add(assignment.row)
        if changed:
            rows = np.array(sorted(changed))
            entries = to_device(np.stack([rows, self._host_deltas[rows]]), self._device)
            self._deltas.index_put_((entries[0],), entries[1])

    def slots(self, image: EncodedImage, num_vectors: int) -> Tensor:
        """Returns the rows of the table that an image's vectors go to, [n] int64.

        Raises:
            ValueError: its pages do not exist, or are too few.
        """
        return to_device(self._slots_of(image.pages, num_vectors), self._device)

    def write(self, batch: Batch) -> None:
        """Writes what the tokens of a step take from images.

        Raises:
            ValueError: the step names an image that its row does not have, or wrong pages.
        """
        starts = batch.seq_lens - np.diff(batch.query_start_loc)
        self._key_ends = None
        showing = np.flatnonzero(starts < self._ends[batch.row_ids]).tolist()
        pages: dict[int, list[tuple[int, bytes]]] = {}
        for each in batch.images:
            require(each.request in showing, "an image of a request whose tokens show none")
            pages.setdefault(each.request, []).append((each.image, each.pages))
        key_ends = batch.positions + 1
        if self._builds_kernels:
            self._key_ends = to_device(key_ends, self._device)
        if not showing and not self._num_written:
            return
        num_tokens = batch.num_tokens
        size = max(num_tokens, self._num_written)
        index = np.full((2, size), _NONE, np.int32)
        positions = np.full((3, size), _NONE, np.int64)
        for request in showing:
            images = self._row_images[int(batch.row_ids[request])]
            first, last = batch.query_start_loc[request : request + 2].tolist()
            start = int(starts[request])
            if images.rope_positions is not None:
                own = images.rope_positions[:, start : start + last - first]
                positions[:, first : first + own.shape[1]] = own
            for number, page_ids in pages.get(request, ()):
                require(number < len(images.tokens), "an image that its row does not have")
                tokens = images.tokens[number]
                slots = self._slots_of(page_ids, len(tokens))
                for part, before in enumerate((tokens, tokens - 1)):
                    is_here = (before >= start) & (before < start + last - first)
                    index[part, first + before[is_here] - start] = slots[is_here]
                if self.sees_later:
                    end = int(tokens[-1]) + 1
                    require(end <= start + last - first, "a step that ends inside of an image")
                    key_ends[first + tokens[tokens >= start] - start] = end
        self._index[:, :size] = to_device(index, self._device)
        self._own_positions[:, :size] = to_device(positions, self._device)
        self._num_written = num_tokens if showing else 0
        if self.sees_later and batch.images:
            self._key_ends = to_device(key_ends, self._device)

    def metadata(
        self,
        positions: Tensor,
        token_rows: Tensor,
        *,
        are_decodes: bool,
        is_recorded: bool,
        is_draft: bool,
    ) -> ImageMetadata:
        """Returns what a forward pass reads.

        Args:
            positions: [T'] int64, T of tokens and padding.
            token_rows: [T] int32, the row of each token.
            are_decodes: whether all tokens come after their prompts' images.
            is_recorded: whether a graph is recorded, which other steps replay.
            is_draft: whether a draft layer embeds the successors of the tokens.
        """
        num_padded, num_tokens = len(positions), len(token_rows)
        rope_positions = None
        if self._has_mrope:
            rope_positions = self._rope_positions[:, :num_padded]
            shifted = positions[:num_tokens] + self._deltas.index_select(0, token_rows)
            if are_decodes:
                rope_positions[:, :num_tokens] = shifted
            else:
                own = self._own_positions[:, :num_tokens]
                rope_positions[:, :num_tokens] = torch.where(own < 0, shifted, own)
        has_index = not are_decodes and (is_recorded or self._num_written) and len(self.rows)
        return ImageMetadata(
            rows=self.rows,
            index=self._index[int(is_draft), :num_padded] if has_index else None,
            rope_positions=rope_positions,
            key_ends=None if are_decodes or is_draft else self._key_ends,
            only_windows_see_later=self._only_windows,
        )

    @contextmanager
    def building_kernels(self) -> Iterator[None]:
        """Has steps without images run the kernels of tokens that see later ones, to build them."""
        self._builds_kernels = self.sees_later
        yield
        self._builds_kernels = False

    def _read_row(self, assignment: RowAssignment) -> tuple[_RowImages, int]:
        """Returns a row's images, and what later tokens add to their positions."""
        token_ids = read_int32(assignment.token_ids)
        spans, end = [], 0
        for each in assignment.images:
            require(
                end <= each.offset < each.offset + each.num_tokens <= assignment.num_prompt_tokens,
                "images that do not follow each other in the prompt",
            )
            end = each.offset + each.num_tokens
            spans.append((each.offset, each.num_tokens, tuple(each.grid)))
        is_vector = token_ids[:end] == self._image_token_id
        tokens = [
            offset + np.flatnonzero(is_vector[offset : offset + count])
            for offset, count, _ in spans
        ]
        rope_positions, delta = None, 0
        if self._has_mrope:
            laid_out = [(offset, count, self._sides(grid)) for offset, count, grid in spans]
            rope_positions, delta = image_rope_positions(end, laid_out)
        return _RowImages(end=end, tokens=tokens, rope_positions=rope_positions), delta

    def _slots_of(self, page_ids: bytes, num_vectors: int) -> npt.NDArray[np.int64]:
        pages = read_int32(page_ids).astype(np.int64)
        require(is_below(pages, self._num_pages), "a page of images that does not exist")
        require(len(pages) * PAGE_VECTORS >= num_vectors, "too few pages for an image")
        slots = pages[:, None] * PAGE_VECTORS + np.arange(PAGE_VECTORS)
        return slots.ravel()[:num_vectors]
