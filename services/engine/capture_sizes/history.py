"""The step sizes of all runs of a model under the same limits, kept in a file between them.

Engines that share a folder add to the same file: each reads it, adds the steps that it has run
since it last wrote, and puts a new file in its place. Two that do so in the same instant may lose
one of the two additions, but never the file.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import structlog
from pydantic import Field, TypeAdapter, ValidationError

from models.config import CONFIG_FILE
from models.cudagraph_mode import CUDAGraphMode
from services.engine.capture_sizes.histogram import StepHistogram
from services.engine.config import EngineConfig

log = structlog.get_logger()

MAX_STEPS_KEPT = 1_000_000
"""Where there are more, counts are halved, so that what is planned follows the load."""

_Count = Annotated[int, Field(ge=0)]
_Counts = dict[Annotated[int, Field(ge=1)], _Count]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphCost:
    """What the capture of one graph took. uniform: of decodes, else of other steps."""

    uniform: bool
    num_tokens: int
    num_bytes: _Count
    capture_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHistory:
    """What capture sizes are planned from.

    decodes, others: see StepHistogram. graphs: those that the last engine with any had captured, in
    the mode `cudagraph_mode`, a name of CUDAGraphMode.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    cudagraph_mode: str = CUDAGraphMode.NONE.name
    decodes: _Counts
    others: _Counts
    graphs: tuple[GraphCost, ...] = ()

    @classmethod
    def empty(cls, config: EngineConfig) -> "StepHistory":
        """Returns the history of an engine that has run nothing."""
        return cls(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            decodes={},
            others={},
        )

    @property
    def histogram(self) -> StepHistogram:
        """The steps by size."""
        return StepHistogram(Counter(self.decodes), Counter(self.others))

    @property
    def mode(self) -> CUDAGraphMode:
        """What ran as captured graphs."""
        return CUDAGraphMode[self.cudagraph_mode]

    @property
    def max_decode_size(self) -> int:
        """Most requests that a step of decodes can have."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    def with_steps(self, histogram: StepHistogram) -> "StepHistory":
        """Returns the same with other steps."""
        return replace(self, decodes=dict(histogram.decodes), others=dict(histogram.others))

    def costs(self, *, uniform: bool) -> Mapping[int, int]:
        """Returns the bytes that graphs of one kind added, by size."""
        costs = Counter[int]()
        for each in self.graphs:
            if each.uniform == uniform:
                costs[each.num_tokens] += each.num_bytes
        return costs


_FORM = TypeAdapter(StepHistory)


def history_path(config: EngineConfig) -> Path | None:
    """Returns the file of an engine's history; None if none is kept, as with speculation.

    Its name tells the model's shape and the limits that bound the size of a step.
    """
    if not config.histogram_dir or config.num_speculative_tokens:
        return None
    model = hashlib.sha256((config.model / CONFIG_FILE).read_bytes()).hexdigest()[:16]
    name = f"{model}-{config.max_num_seqs}-{config.max_num_batched_tokens}.json"
    return Path(config.histogram_dir).expanduser() / name


def read_history(path: Path) -> StepHistory:
    """Reads a history.

    Raises:
        OSError: the file cannot be read.
        ValueError: it does not hold a history; the message names it and says what is wrong.
    """
    try:
        history = _FORM.validate_json(path.read_bytes())
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(str(part) for part in problem["loc"])
        raise ValueError(f"{path} does not hold step sizes: {place} {problem['msg']}") from None
    if history.cudagraph_mode not in CUDAGraphMode.__members__:
        raise ValueError(f"{path} does not hold step sizes: no mode {history.cudagraph_mode}")
    largest = max([*history.decodes, *history.others], default=0)
    if largest > history.max_num_batched_tokens:
        raise ValueError(
            f"{path} does not hold step sizes: a step of {largest} tokens is above the limit, "
            f"which is {history.max_num_batched_tokens}"
        )
    return history


class HistoryKeeper:
    """Joins what this engine runs to what earlier and other engines ran."""

    def __init__(self, config: EngineConfig, running: StepHistogram) -> None:
        """Reads what is kept.

        Args:
            config: names the file and the limits.
            running: this run's steps, which the step loop counts in.
        """
        self._path = history_path(config)
        self._running = running
        self._written = StepHistogram()
        self._empty = StepHistory.empty(config)
        self._kept = self._read()

    @property
    def history(self) -> StepHistory:
        """Everything known now, of this run too."""
        return self._kept.with_steps(self._kept.histogram + (self._running - self._written))

    def save(self, mode: str, graphs: Sequence[GraphCost]) -> None:
        """Adds what was run since the last time to the file, unless nothing was.

        A file that cannot be written costs a warning; its steps are tried again the next time.

        Args:
            mode: what runs as captured graphs.
            graphs: those that were captured.
        """
        news = self._running - self._written
        if self._path is None or not news.num_steps:
            return
        kept = self._read()
        histogram = kept.histogram + news
        while histogram.num_steps > MAX_STEPS_KEPT:
            histogram = histogram.halved()
        if graphs:
            kept = replace(kept, cudagraph_mode=mode, graphs=tuple(graphs))
        merged = kept.with_steps(histogram)
        try:
            _write(self._path, merged)
        except OSError as error:
            log.warning("step_history_not_written", path=str(self._path), error=str(error))
            return
        self._kept = merged
        self._written += news

    def _read(self) -> StepHistory:
        """Returns what the file holds; a damaged one counts as none."""
        if self._path is None or not self._path.exists():
            return self._empty
        try:
            return read_history(self._path)
        except (OSError, ValueError) as error:
            log.warning("step_history_not_read", path=str(self._path), error=str(error))
            return self._empty


def _write(path: Path, history: StepHistory) -> None:
    """Puts a new file in the old one's place; a reader sees one or the other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Engines that share the folder, also from other hosts, must not write to the same one.
    draft = path.with_name(f"{path.name}.{os.getpid()}-{os.urandom(4).hex()}")
    try:
        draft.write_bytes(_FORM.dump_json(history))
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
