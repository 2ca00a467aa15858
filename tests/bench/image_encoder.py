"""The encoder of images alone: eager, compiled and as a graph, beside the floor.

python -m tests.bench.image_encoder --shape qwen3-vl-8b qwen3.5-35b-a3b-images

Random weights, images of noise, no text model. Each size is measured with each of --images at once.
--sides are patches on each side of an image: with patches of 16 pixels 32, 64 and 128 are 0.25, 1
and 4 megapixels. A graph has the images' own patches, a padded one an eighth more. Attention is
also measured alone, with the same segments, and with --tiles in other tiles and by torch. --profile
prints the kernels of a graph beside their floors; --products measures each product of a layer alone
in several ways. On a CPU Inductor compiles nothing, and graphs are emulated.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from models.layers.vision_tower import TowerLayers, VisionTower
from models.loading.model_config import read_model_config
from models.ops.attention.segment_attention import segment_attention
from models.registry import make_tower
from services.engine.compilation.compile_layers import compile_layers
from services.engine.compilation.graphs.capture_plan import encoder_key
from services.engine.compilation.pieces.compiler_interface import CompilerInterface, EagerAdaptor
from services.engine.compilation.pieces.compiler_manager import CompilerManager
from services.engine.compilation.pieces.piece_compiler import PieceCompiler
from services.engine.worker.graphs.encoder_program import EncoderProgram
from services.engine.worker.start.graph_setup import piece_graphs
from tests.bench.encoder_parts import dense_attention_times, kernel_lines, product_times
from tests.bench.kernels import microseconds
from tests.bench.model_folder import make_model_folder, shape_names
from tests.bench.program import print_report
from tests.bench.report import Report
from tests.bench.tower_floor import FLOP_PER_MS, tower_floor, tower_floor_ms

SEED = 1
TILES = (
    (128, 64, 4, 2), (128, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3),
    (64, 128, 4, 2), (256, 64, 8, 3),
)  # fmt: skip
"""Rows, keys, warps and stages of attention's tiles."""
PADDING = 8
"""A padded graph has this part of its images' patches more."""


class TowerBench:
    """One encoder under measurement."""

    def __init__(
        self, shape: str, pieces: PieceCompiler, report: Report, arguments: argparse.Namespace
    ) -> None:
        self._shape = shape
        self._pieces = pieces
        self._report = report
        self._rounds = arguments.rounds
        self._arguments = arguments
        self._device = torch.device(arguments.device)
        self._dtype = torch.float32 if self._device.type == "cpu" else torch.bfloat16
        self._tower = self._make(shape, arguments.num_layers)
        self._layers = [m for m in self._tower.modules() if isinstance(m, TowerLayers)]

    def measure(self, sides: list[int], counts: list[int]) -> None:
        """Measures all sizes, first as it is written and then compiled."""
        cases = [[(side, side)] * count for side in sides for count in counts]
        for grids in cases:
            self._add("eager", grids, self._encoder(grids))
            self._attention(grids)
            if self._arguments.products:
                self._products(grids)
        self._compile()
        for grids in cases:
            self._add("compiled", grids, self._encoder(grids))
            for name, extra in (("graph", 0), ("padded graph", 1)):
                self._add(name, grids, self._graph(grids, extra))
            if self._arguments.profile:
                self._profile(grids)

    def _profile(self, grids: list[tuple[int, int]]) -> None:
        floor = tower_floor(self._tower, grids)
        lines = kernel_lines(self._graph(grids, 0), self._device.type, floor)
        title = f"{self._shape} {len(grids)} x {grids[0][0]}"
        print("\n".join([f"\n=== kernels of a graph, {title}", *lines]), flush=True)
        self._report.state(f"{title} kernels", lines)

    def _products(self, grids: list[tuple[int, int]]) -> None:
        num_rows = sum(map(self._tower.config.num_patches, grids))
        for name, time_us, floor_us in product_times(self._layers[0][0], num_rows):
            title = f"{self._shape} {num_rows} rows, {name}"
            self._report.add(title, [time_us], "us", floor=floor_us)

    def _make(self, shape: str, num_layers: int | None) -> VisionTower:
        with TemporaryDirectory() as parent:
            folder = make_model_folder(shape, Path(parent))
            vision = read_model_config(folder, "auto", sees_images=True).vision
        assert vision is not None, "the shape has an encoder"
        if num_layers is not None:
            vision = replace(vision, num_layers=num_layers)
        before = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)
        try:
            with self._device:
                tower = make_tower(vision)
        finally:
            torch.set_default_dtype(before)
        torch.manual_seed(SEED)
        for weight in tower.parameters():
            weight.requires_grad_(requires_grad=False).normal_(std=0.02)
        return tower

    def _compile(self) -> None:
        started_s = time.perf_counter()
        for layers in self._layers:
            layers.use(compile_layers(layers, self._pieces, name="tower"))
        self._report.state(f"{self._shape}: compile_s", round(time.perf_counter() - started_s, 1))

    def _inputs(self, grids: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        layout = self._tower.lay_out(grids)
        shape = layout.shape[1], self._tower.config.patch_bytes
        return np.random.default_rng(SEED).integers(0, 256, shape, dtype=np.uint8), layout

    def _encoder(self, grids: list[tuple[int, int]]) -> Callable[[], object]:
        patches, layout = (torch.from_numpy(x).to(self._device) for x in self._inputs(grids))
        return lambda: self._tower.encode(patches, layout)

    def _graph(self, grids: list[tuple[int, int]], num_extra: int) -> Callable[[], object]:
        patches, layout = self._inputs(grids)
        count, unit = len(patches), self._tower.config.patch_unit
        key = encoder_key(count + num_extra * unit * max(1, count // PADDING // unit))
        program = EncoderProgram(self._tower, key.num_tokens, self._device)
        program.write(key, patches, layout)
        recorder = piece_graphs(self._device, self._dtype).recorder
        recorder.warm_up(program.program(key))
        return recorder.record(program.program(key)).replay

    def _attention(self, grids: list[tuple[int, int]]) -> None:
        """Measures attention of one layer, beside the floor of its products."""
        vision, layout = self._tower.config, self._inputs(grids)[1]
        bounds = torch.from_numpy(layout[4:6].T.copy()).to(self._device)
        shape = layout.shape[1], 3 * vision.num_heads, vision.head_dim
        heads = torch.randn(shape, device=self._device).to(self._dtype)
        q, k, v = heads.chunk(3, dim=1)
        flop = 4 * sum((height * width) ** 2 for height, width in grids) * vision.hidden_size
        scale, floor_ms = vision.head_dim**-0.5, flop / FLOP_PER_MS

        def attend() -> torch.Tensor:
            return segment_attention(q, k, v, bounds, scale)

        self._add("one attention", grids, attend, floor_ms=floor_ms)
        if not self._arguments.tiles:
            return
        for name, time_us in dense_attention_times(q, k, v, len(grids), scale):
            title = f"{self._shape} {len(grids)} x {grids[0][0]} attention {name}"
            self._report.add(title, [time_us], "us", floor=1000 * floor_ms)
        from models.kernels.attention import segment_attention as kernel

        for sizes in TILES:
            tiles = kernel.SegmentTiles(*sizes)

            def attend_so(tiles: kernel.SegmentTiles = tiles) -> torch.Tensor:
                return kernel.segment_attention(q, k, v, bounds, scale, tiles)

            title = f"{self._shape} {len(grids)} x {grids[0][0]} attention "
            title += "x".join(map(str, sizes))
            self._report.add(title, [microseconds([attend_so])], "us", floor=1000 * floor_ms)

    def _add(
        self,
        name: str,
        grids: list[tuple[int, int]],
        run: Callable[[], object],
        floor_ms: float | None = None,
    ) -> None:
        if floor_ms is None:
            floor_ms = tower_floor_ms(self._tower, grids)
        title = f"{self._shape} {len(grids)} x {grids[0][0]} {name}"
        self._report.add(title, self._times_us(run), "us", floor=1000 * floor_ms)

    def _times_us(self, run: Callable[[], object]) -> list[float]:
        """Returns microseconds of each round, the wait for the device included."""
        times_us = []
        for _ in range(self._rounds + 2):
            self._wait()
            started_s = time.perf_counter()
            run()
            self._wait()
            times_us.append(1e6 * (time.perf_counter() - started_s))
        return times_us[2:]

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", choices=shape_names(), nargs="+", default=["qwen3-vl-8b"])
    parser.add_argument("--sides", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--images", type=int, nargs="+", default=[1, 4], help="of each size")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tiles", action="store_true", help="also try other tiles of attention")
    parser.add_argument("--profile", action="store_true", help="print the kernels of graphs")
    parser.add_argument("--products", action="store_true", help="measure products alone")
    parser.add_argument("--num-layers", type=int, help="of the encoder")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="write the result to this file as JSON")
    arguments = parser.parse_args()
    report = Report("image_encoder", path=arguments.out, shape=" ".join(arguments.shape))
    # Layers of one form share a piece, those of several shapes too.
    pieces = PieceCompiler(CompilerManager(_compiler(arguments.device), {}))
    for shape in arguments.shape:
        with torch.inference_mode():
            bench = TowerBench(shape, pieces, report, arguments)
            bench.measure(arguments.sides, arguments.images)
    print_report(report)


def _compiler(device: str) -> CompilerInterface:
    if device == "cpu":
        return EagerAdaptor()
    from services.engine.compilation.pieces.inductor_adaptor import InductorStandaloneAdaptor

    return InductorStandaloneAdaptor()


if __name__ == "__main__":
    main()
