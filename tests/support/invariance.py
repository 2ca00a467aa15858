"""Runs requests in many ways that must not change a bit of their logits."""

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from models.batch_invariance import use_batch_invariance
from models.cudagraph_mode import CUDAGraphMode
from models.kv_cache import FP8_CACHE_DTYPE
from tests.support.compilation import compilation_config
from tests.support.graph_engine import GraphEngine

NUM_OUTPUT = 5
BATCH_SIZES = (1, 2, 3, 5, 8, 13, 16)
CHUNK_SIZES = (16, 17, 24, 33, 100)
MODES = (
    CUDAGraphMode.PIECEWISE,
    CUDAGraphMode.FULL_DECODE_ONLY,
    CUDAGraphMode.FULL,
)


@contextmanager
def batch_invariance() -> Iterator[None]:
    """Turns the mode on for the length of the block."""
    use_batch_invariance(is_on=True)
    try:
        yield
    finally:
        use_batch_invariance(is_on=False)


def make_prompts(count: int, *, longest: int = 40, vocab_size: int = 97) -> list[list[int]]:
    """Draws prompts; some begin alike."""
    draw = random.Random(0)
    shared = [draw.randrange(vocab_size) for _ in range(longest // 2)]
    prompts = []
    for number in range(count):
        rest = [draw.randrange(vocab_size) for _ in range(draw.randint(1, longest // 2))]
        prompts.append(shared + rest if number % 3 == 0 else rest)
    return prompts


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to run all requests.

    options: of GraphEngine. flags: of compilation. repeats: how often all requests run.
    """

    level: int = 0
    mode: CUDAGraphMode = CUDAGraphMode.NONE
    options: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)
    repeats: int = 1


def ways() -> dict[str, Way]:
    """Returns all ways, by name."""
    named = {f"{size} requests": Way(options={"max_num_seqs": size}) for size in BATCH_SIZES}
    for size in CHUNK_SIZES:
        options = {"max_num_batched_tokens": size, "max_num_seqs": 8}
        named[f"chunks of {size}"] = Way(options=options)
    named["prefix hits"] = Way(repeats=2)
    named["preempted"] = Way(options={"num_blocks": 24})
    named["drafts"] = Way(options={"num_speculative_tokens": 2, "lookup_sizes": (1, 3)})
    for level in (1, 2, 3):
        named[f"level {level}"] = Way(level=level)
    for mode in MODES:
        for level in (0, 2, 3):
            if mode is CUDAGraphMode.PIECEWISE and level == 2:
                continue  # pieces are those of levels 0 and 3
            named[f"{mode.name} on level {level}"] = Way(
                level=level, mode=mode, flags={"cudagraph_capture_sizes": [3, 8, 20, 100]}
            )
    return named


@dataclass(frozen=True)
class Outcome:
    """Tokens of all requests, and hashes of all rows of logits."""

    tokens: list[list[int]]
    hashes: frozenset[str]
    engine: GraphEngine


def run(
    folder,
    prompts: Sequence[Sequence[int]],
    way: Way,
    chosen: Sequence[Path | None] = (),
    **common: Any,
) -> Outcome:
    """Runs all prompts in one way; captures all graphs before.

    chosen: the adapter of each prompt.
    """
    defaults = {
        "max_num_seqs": 16,
        "max_num_batched_tokens": 200,
        "max_model_len": 128,
        "num_blocks": 200,
    }
    config = compilation_config(
        level=way.level, cudagraph_mode=way.mode, use_inductor=False, **way.flags
    )
    engine = GraphEngine(folder, config, **{**defaults, **common, **way.options})
    assert [each.fault for each in engine.capture() if each.fault] == []
    hashes = set()

    def note(hidden, logits):
        del hidden
        if logits is not None:
            hashes.update(_hashed(logits))

    engine.runner.watch_outputs(note)
    for _ in range(way.repeats):
        tokens = engine.run(prompts, NUM_OUTPUT, adapters=chosen)
    return Outcome(tokens, frozenset(hashes), engine)


def run_alone(
    folder, prompts: Sequence[Sequence[int]], chosen: Sequence[Path | None] = (), **common: Any
) -> Outcome:
    """Runs each prompt by itself, without what others have cached."""
    outcomes: list[Outcome] = []
    for index, prompt in enumerate(prompts):
        model = outcomes[0].engine.model if outcomes else None
        own = chosen[index : index + 1]
        outcomes.append(run(folder, [prompt], Way(), own, model=model, **common))
    hashes = frozenset().union(*(each.hashes for each in outcomes))
    return Outcome([each.tokens[0] for each in outcomes], hashes, outcomes[0].engine)


def assert_same_bits(alone: Outcome, together: Outcome) -> None:
    """Fails unless the requests had these tokens and every row of logits was computed again."""
    assert together.tokens == alone.tokens
    assert alone.hashes <= together.hashes


def _hashed(logits: torch.Tensor) -> list[str]:
    rows = logits.contiguous().view(torch.uint8).cpu().numpy()
    return [hashlib.sha256(row.tobytes()).hexdigest() for row in rows]


FORMATS = {
    "float32": {"dtype": torch.float32},
    "bfloat16": {"dtype": torch.bfloat16},
    "8-bit cache": {"cache_dtype": FP8_CACHE_DTYPE},
}
"""Options of GraphEngine."""
