"""Encodes the images that steps order."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.batch_invariance import is_batch_invariant
from models.forward_context import GraphKey
from models.layers.vision_tower import TowerLayers, VisionTower
from services.engine.batch import EncodedImage, EncoderRun, pack_int32
from services.engine.compilation.graphs.capture_plan import wire_key
from services.engine.config.images import PAGE_VECTORS
from services.engine.limits import StepLimits
from services.engine.patch_memory import PatchMemory
from services.engine.worker.graphs.encoder_program import EncoderProgram
from services.engine.worker.graphs.graph_set import GraphSet
from services.engine.worker.inputs.checks import require
from services.engine.worker.inputs.image_inputs import ImageInputs
from services.engine.worker.inputs.transfer import to_device


class ImageEncoder:
    """Runs the encoder before the forward pass of a step, as a graph where one has room."""

    def __init__(self, tower: VisionTower, inputs: ImageInputs, limits: StepLimits) -> None:
        """Starts without graphs."""
        self.tower = tower
        self.memory: PatchMemory | None = None
        """Has the patches of images that steps give a place."""
        self._inputs = inputs
        self._limits = limits
        self._layers = [each for each in tower.modules() if isinstance(each, TowerLayers)]
        self._graphs = GraphSet()
        self._program: EncoderProgram | None = None
        self._keys: Sequence[GraphKey] = ()

    def use_graphs(
        self, graphs: GraphSet, program: EncoderProgram, keys: Sequence[GraphKey]
    ) -> None:
        """Runs graphs from now on.

        Args:
            graphs: captures and replays them.
            program: of the graphs.
            keys: of the graphs, smallest first.
        """
        self._graphs, self._program, self._keys = graphs, program, keys

    def encode(self, images: Sequence[EncodedImage]) -> EncoderRun | None:
        """Writes the vectors of images into the table; returns how they were encoded.

        Raises:
            ValueError: an image has other patches than its grid says, or too few pages.
        """
        if not images:
            return None
        if is_batch_invariant():
            # Products of other numbers of rows round otherwise.
            runs = [self._encode([image]) for image in images]
            runs[0].num_images = len(images)
            runs[0].num_patches = sum(run.num_patches for run in runs)
            return runs[0]
        return self._encode(images)

    def encode_largest(self) -> None:
        """Encodes as many vectors as any step does, to measure its memory."""
        vision, num_pages = self.tower.config, self._limits.num_encoder_pages
        grid = vision.largest_grid(num_pages * PAGE_VECTORS)
        patches = bytes(vision.num_patches(grid) * vision.patch_bytes)
        pages = pack_int32(range(num_pages))
        self.encode([EncodedImage(patches=patches, grid=grid, pages=pages)])

    def _encode(self, images: Sequence[EncodedImage]) -> EncoderRun:
        tower = self.tower
        grids = [tuple(each.grid) for each in images]
        parts = [self._patches_of(each) for each in images]
        patches = parts[0] if len(parts) == 1 else np.concatenate(parts)
        layout = tower.lay_out(grids)
        require(len(patches) == layout.shape[1], "an image whose patches are not those of its grid")
        run = EncoderRun(
            is_compiled=any(each.are_replaced for each in self._layers),
            num_images=len(images),
            num_patches=len(patches),
        )
        encoded = self._replayed(run, patches, layout)
        if encoded is None:
            device = self._inputs.rows.device
            encoded = tower.encode(to_device(patches, device), to_device(layout, device))
        vectors = tower.arrange(encoded, grids)
        counts = [tower.num_vectors(grid) for grid in grids]
        require(len(vectors) == sum(counts), "an image whose vectors are not those of its grid")
        for image, part in zip(images, torch.split(vectors, counts), strict=True):
            self._write(image, part)
        return run

    def _patches_of(self, image: EncodedImage) -> NDArray[np.uint8]:
        """Returns the patches of an image, [N, bytes of a patch]."""
        if image.HasField("place"):
            assert self.memory is not None, "the service places patches in memory that it shares"
            content = self.memory.read(image.place.begin, image.place.num_bytes)
        else:
            # A copy, as torch warns of memory that it may not write.
            content = memoryview(bytearray(image.patches))
        return np.frombuffer(content, np.uint8).reshape(-1, self.tower.config.patch_bytes)

    def _replayed(
        self, run: EncoderRun, patches: NDArray[np.uint8], layout: NDArray[np.int32]
    ) -> Tensor | None:
        """Returns the vectors of the smallest graph with room, and notes it; None without one."""
        key = next((each for each in self._keys if each.num_tokens >= len(patches)), None)
        if key is None or self._program is None:
            return None
        if self._graphs.is_captured(key):
            self._program.write(key, patches, layout)
        outputs = self._graphs.replay(key, None)
        if outputs is None:
            return None
        run.graph_key.CopyFrom(wire_key(key))
        return outputs[0]

    def _write(self, image: EncodedImage, vectors: Tensor) -> None:
        self._inputs.rows.index_copy_(0, self._inputs.slots(image, len(vectors)), vectors)
