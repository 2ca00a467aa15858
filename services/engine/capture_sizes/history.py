"""The step sizes of an engine's runs, kept in a file.

An engine reads the file at its start, counts on, and rewrites the file. Engines that share a folder
overwrite each other's counts. The scheduler's limits bound the number of sizes.
"""

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import structlog
from pydantic import Field, TypeAdapter, ValidationError

from models.config import CONFIG_FILE
from models.cudagraph_mode import CUDAGraphMode
from services.engine.config.engine_config import EngineConfig
from services.processes.private_folder import (
    ExposedFolderError,
    make_private,
    private_path,
    write_private,
)
from services.settings.regular_file import read_regular_file

log = structlog.get_logger()

HISTOGRAMS = "histograms"
"""Folder of histories inside the one of compiled code."""
MAX_FILE_BYTES = 2**24
"""8192 sizes of each kind take 0.3 MB."""

_BySize = dict[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=0)]]


@dataclass(slots=True, kw_only=True)
class StepHistory:
    """Counts of steps by size, and the memory of the graphs that ran them.

    decodes: steps with one query token per request, by number of requests.
    others: all other steps, by number of query tokens.
    cudagraph_mode: CUDAGraphMode name of the last engine with graphs.
    decode_graphs, piece_graphs: bytes added by each of that engine's graphs, by tokens.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    decodes: _BySize = field(default_factory=dict)
    others: _BySize = field(default_factory=dict)
    cudagraph_mode: str = CUDAGraphMode.NONE.name
    decode_graphs: _BySize = field(default_factory=dict)
    piece_graphs: _BySize = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ValueError for an unknown mode or a step above the scheduler's limit."""
        if self.cudagraph_mode not in CUDAGraphMode.__members__:
            raise ValueError(f"no mode {self.cudagraph_mode}")
        largest = max([*self.decodes, *self.others], default=0)
        if largest > self.max_num_batched_tokens:
            limit = self.max_num_batched_tokens
            raise ValueError(f"a step of {largest} tokens is above the limit, which is {limit}")

    @property
    def mode(self) -> CUDAGraphMode:
        """The mode of the last engine with graphs."""
        return CUDAGraphMode[self.cudagraph_mode]

    @property
    def max_decode_size(self) -> int:
        """Most requests in a step of decodes."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def num_steps(self) -> int:
        """Steps counted."""
        return sum(self.decodes.values()) + sum(self.others.values())

    def count(self, *, num_tokens: int, batch_size: int) -> None:
        """Counts one step that ran."""
        counts = self.decodes if num_tokens == batch_size else self.others
        counts[num_tokens] = counts.get(num_tokens, 0) + 1

    def by_graph_kind(self, mode: CUDAGraphMode) -> tuple[Counter[int], Counter[int]]:
        """Returns the steps for decode graphs and for pieces in a mode."""
        decodes, pieces = Counter[int](), Counter[int]()
        if mode.mixed_mode():
            pieces.update(self.others)
        if mode.decode_mode() is CUDAGraphMode.FULL:
            decodes.update(self.decodes)
        elif mode.decode_mode() is CUDAGraphMode.PIECEWISE:
            pieces.update(self.decodes)
        return decodes, pieces


_FORM = TypeAdapter(StepHistory)


def history_path(config: EngineConfig) -> Path | None:
    """Returns the file for a model's config.json and the scheduler's limits.

    None if none is kept, as with speculation.
    """
    settings = config.compilation
    if settings.histogram_dir == "" or config.speculation.num_speculative_tokens:
        return None
    model = hashlib.sha256((config.checkpoint.model / CONFIG_FILE).read_bytes()).hexdigest()[:16]
    name = f"{model}-{config.scheduler.max_num_seqs}-{config.max_num_batched_tokens}.json"
    folder = settings.histogram_dir
    return (settings.code_dir / HISTOGRAMS if folder is None else private_path(Path(folder))) / name


def read_history(path: Path) -> StepHistory:
    """Reads a history.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a history; the message names the file and the reason.
    """
    try:
        return _FORM.validate_json(read_regular_file(path, max_bytes=MAX_FILE_BYTES))
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(str(part) for part in problem["loc"])
        raise ValueError(f"{path} does not hold step sizes: {place} {problem['msg']}") from None


def load_history(config: EngineConfig) -> StepHistory:
    """Returns the history of earlier runs, empty if the file is missing or damaged."""
    path = history_path(config)
    if path is not None and path.exists():
        try:
            make_private(path.parent)
            return read_history(path)
        except (OSError, ValueError) as error:
            log.warning("step_history_not_read", path=str(path), error=str(error))
    return StepHistory(
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
    )


def save_history(history: StepHistory, path: Path) -> bool:
    """Replaces the file atomically; on failure logs a warning and returns False."""
    try:
        write_private(path, _FORM.dump_json(history))
    except (OSError, ExposedFolderError) as error:
        log.warning("step_history_not_written", path=str(path), error=str(error))
        return False
    return True
