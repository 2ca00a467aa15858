"""Shapes of the kernels' programs, which the tables of a GPU are made of."""

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Self

from models.kernels.gpu import Gpu

GROUP_ROWS = 64
"""Rows of a weight that a warp group multiplies."""
MAX_SPLITS = 32
"""Most parts of one sequence's keys, but for AttentionTiles.most_splits; a power of two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Warps and pipeline stages, which every program that Triton compiles has."""

    num_warps: int
    num_stages: int

    def fitting(self, gpu: Gpu, stage_bytes: int) -> Self:
        """Returns the tiles with as many stages as fit into shared memory."""
        return replace(self, num_stages=gpu.stages(self.num_stages, stage_bytes))


@lru_cache
def constants_of(tiles: Tiles) -> dict[str, int]:
    """Returns the tiles as a kernel's constants, in upper case, and options; read only."""
    return {
        each.name if each.name.startswith("num_") else each.name.upper(): getattr(tiles, each.name)
        for each in fields(tiles)
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorTiles:
    """Scalar products: outputs of a program, inputs of a tile, warps."""

    rows: int
    columns: int
    num_warps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixTiles:
    """Tensor cores: tokens; rows of the weight, gate and up together; inputs of a tile.

    tokens: 8 to 64, a power of two.
    rows: 64 or 128.
    columns: 64, 128 or 256.
    num_stages: tiles of a warp group's ring.
    groups: warp groups of a program, 1 to 3, which take turns at the tiles.
    splits: parts of the inputs, each summed by programs of its own.
    """

    tokens: int
    rows: int
    columns: int
    num_stages: int
    groups: int = 1
    splits: int = 1

    def unsplit(self) -> "MatrixTiles":
        """Returns the tiles for a caller that needs the whole sum."""
        return self if self.splits == 1 else _unsplit(self)


@lru_cache
def _unsplit(tiles: MatrixTiles) -> MatrixTiles:
    return replace(tiles, splits=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class WideTiles:
    """Warp groups of a program, tokens of a tile, slots for loading inputs.

    splits: parts of the inputs, each summed by programs of its own.
    parts: parts of a program's inputs, each summed apart and added in order.
    """

    groups: int
    tokens: int
    slots: int
    splits: int = 1
    parts: int = 1

    def count(self, num_tokens: int, num_rows: int) -> int:
        """Returns the number of tiles of a weight of `num_rows` rows."""
        return -(-num_rows // (self.groups * GROUP_ROWS)) * -(-num_tokens // self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class WideFP8Tiles:
    """Tiles of fp8_configurations.FP8_TOKENS tokens, of wide_fp8_linear.

    rows: of the weight in one product of the tensor cores, 64 or 128.
    products: products of a tile, 1 or 2, each with as many rows.
    slots: for loading inputs.
    splits: parts of the inputs, each summed by programs of its own.
    """

    rows: int
    products: int
    slots: int
    splits: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NarrowFP8Tiles:
    """Tiles of all of few tokens, of narrow_fp8_linear.

    tokens: at most as many, 8 to 64, a power of two.
    groups: warp groups of a program, 1 or 2, with 64 outputs each.
    programs: of a multiprocessor, 1 or 2.
    slots: for loading inputs.
    splits: parts of the inputs, each summed by programs of its own.
    """

    tokens: int
    groups: int
    programs: int
    slots: int
    splits: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTiles:
    """Tiles of packed_wide_linear.

    tokens: 32 to 256, a power of two.
    groups: warp groups of a program, 1 to 3, with 64 rows each.
    slots: for loading inputs.
    programs: of a multiprocessor, 1 or 2.
    """

    tokens: int
    groups: int
    slots: int
    programs: int = 1

    @property
    def rows(self) -> int:
        """Rows of the weight of a tile, gate and up together."""
        return self.groups * GROUP_ROWS


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTiles(Tiles):
    """Rows of activations and columns of the result, of fp8_block_linear."""

    rows: int
    columns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTiles(Tiles):
    """Shape of one program of attention: query rows and keys of a tile.

    registers: most of a thread; None leaves the number to the compiler.
    is_exact: a row's bits do not depend on the tiles: online_softmax.weigh_keys.
    keys_as_rows: of products, as in keys_of_8_bits; else queries are. For few_queries, which also
        uses num_programs and least_part.

    Decode attention of single-token steps also uses:
        held_keys: first keys of a part, read into registers before the step's own queries are
            ready; 0 holds none.
        num_programs: programs that share the keys of all requests in equal parts, unless parts get
            short; 0 gives each sequence as many parts as it may have. Not of dealt parts.
        num_dealt: programs that take second and later parts, dealt out by the lengths of all
            sequences; 0 deals none.
        even_parts: a dealt sequence's last part is as long as its others, for tiles whose parts
            mostly run at once; else short ones make room for others.
        least_part: fewest keys of a part that is not the last one.
        most_splits: most parts of one sequence, unless parts are dealt.
        most_partials: most partial results of one launch, unless parts are dealt; 0: as
            configurations.num_splits says.
        starts_next_late: the next kernel starts after all keys are read, not after the queries are.
    """

    rows: int
    keys: int
    registers: int | None = None
    is_exact: bool = False
    held_keys: int = 0
    num_programs: int = 0
    num_dealt: int = 0
    even_parts: bool = False
    least_part: int = 0
    most_splits: int = MAX_SPLITS
    most_partials: int = 0
    starts_next_late: bool = True
    keys_as_rows: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpandedTiles(Tiles):
    """Queries and keys of a tile of expanded_attention."""

    queries: int
    keys: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedTiles(Tiles):
    """Features of a matrix and depth of a tile, of moe_grouped."""

    columns: int
    depth: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FP8ExpertTiles(Tiles):
    """Rows, and features of a matrix, of moe_fp8.

    Features divide 128, so that those of one program share a scale.
    """

    rows: int
    columns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MXFP4Tiles(Tiles):
    """Rows of x and of the weight, of moe_mxfp4.

    depth: elements of a row that are multiplied at a time, a multiple of 32.
    """

    rows: int
    weight_rows: int
    depth: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTiles:
    """Shape of one program of packed experts on tensor cores.

    tokens: 8 to 256, a power of two.
    rows: of the matrix, gate and up together; a multiple of 16 * num_warps.
    columns: inputs of a tile, 64 to 256.
    num_stages: tiles of the ring, of which one is multiplied.
    num_warps: 4 or 8.
    num_unpacked: 2 unpacks a tile while the one before is multiplied, with twice the registers.
    last_tokens: height of an expert's last tile where its tokens fit; for the other ones `tokens`.
    max_registers: of a thread, so that two programs fit a multiprocessor; None for no limit.
    """

    tokens: int
    rows: int
    columns: int
    num_stages: int
    num_warps: int
    num_unpacked: int
    last_tokens: int
    max_registers: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FewTokenTiles:
    """Shape of one program of packed experts with few tokens each.

    tokens: height of a tile, 8 to 32.
    groups: of four warps that multiply 64 rows each, gate and up together; 2 or 4.
    columns: inputs of a step, 64 or 128.
    slots: steps of the ring.
    programs: of a multiprocessor.
    most_inputs: in MXFP4, of tokens that fit the shared memory beside the ring.
    registers: of a thread at first, then in a group that multiplies and in the warp that fetches.
    """

    tokens: int
    groups: int
    columns: int
    slots: int
    programs: int
    most_inputs: int
    registers: tuple[int, int, int]

    @property
    def rows(self) -> int:
        """Rows of the matrix, of all groups."""
        return GROUP_ROWS * self.groups

    def has_room(self, num_inputs: int, words_of_columns: int) -> bool:
        """Returns whether products of `num_inputs` have room.

        words_of_columns: words of scales of 128 columns of a row.
        """
        # Beyond the one of MXFP4 they take the memory of inputs, which have two bytes.
        taken = (words_of_columns - 1) * 4 * self.rows * self.slots // (2 * self.tokens)
        return num_inputs + taken <= self.most_inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTiles:
    """Columns of a recurrent state that a program has, and its warps."""

    columns: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class Forms:
    """Choices of one family of expert kernels.

    experts_per_pair: of a layer, at least, for pairs to be computed alone.
    heights: of tiles, each with the most rows that an expert may have on average; rising. The last
        height takes more rows, too.
    """

    experts_per_pair: int
    heights: tuple[tuple[int, int], ...]
