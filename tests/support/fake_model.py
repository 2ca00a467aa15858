"""Computes the fake worker's results: tokens from prefixes, minus the ones that masks forbid."""

from collections.abc import Callable, Collection, Sequence

import numpy as np

from services.engine.batch import BatchDescriptor, read_int32
from services.engine.request import SamplingParams

VOCAB_SIZE = 1000
_MASK = 2**64 - 1


class WorkerViolationError(Exception):
    """A descriptor broke the contract between scheduler and worker."""


def expected_output(
    prompt: Sequence[int],
    sampling: SamplingParams,
    *,
    max_output: int | None = None,
    vocab_size: int = VOCAB_SIZE,
    allowed: Callable[[list[int]], Collection[int]] | None = None,
) -> list[int]:
    """Returns the tokens that a prompt leads to when it runs alone, the end token included.

    `allowed` returns the tokens that may follow an output, where a constraint decides that.
    """
    key = 0
    for token_id in prompt:
        key = extend(key, token_id)
    output: list[int] = []
    limit = sampling.max_tokens if max_output is None else min(max_output, sampling.max_tokens)
    while len(output) < limit:
        forbidden = sampling.end_token_ids if len(output) < sampling.min_tokens else frozenset()
        if allowed is not None:
            forbidden = forbidden | (frozenset(range(vocab_size)) - frozenset(allowed(output)))
        token_id = choose(key, sampling.seed, forbidden, vocab_size)
        output.append(token_id)
        if token_id in sampling.end_token_ids:
            break
        key = extend(key, token_id)
    return output


def prompt_logprob(token_id: int) -> float:
    """Returns the log-probability that the fake worker reports for a prompt token."""
    return -(token_id % 97) / 128


def extend(key: int, token_id: int) -> int:
    """Mixes one more token into a prefix (splitmix64, Steele et al. 2014); never returns 0."""
    mixed = (key + (token_id + 1) * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return (mixed ^ (mixed >> 31)) or 1


def choose(key: int, seed: int, forbidden: frozenset[int], vocab_size: int) -> int:
    token_id = extend(key, seed) % vocab_size
    while token_id in forbidden:
        token_id = (token_id + 1) % vocab_size
    return token_id


def read_masks(
    descriptor: BatchDescriptor, num_sampling: int, vocab_size: int
) -> dict[int, frozenset[int]]:
    """Returns the tokens that grammars forbid, by index into the requests that sample."""
    rows = read_int32(descriptor.sampling.grammar_rows).tolist()
    require(rows == sorted(set(rows)), "grammar_rows do not ascend")
    if not rows:
        return {}
    require(rows[-1] < num_sampling, "a grammar for a request that does not sample")
    bits = np.frombuffer(descriptor.sampling.grammar_masks, np.uint8).reshape(len(rows), -1)
    require(bits.shape[1] == 4 * -(-vocab_size // 32), "masks of another vocabulary")
    is_allowed = np.unpackbits(bits, axis=1, bitorder="little")[:, :vocab_size]
    require(bool(is_allowed.any(axis=1).all()), "a grammar that allows nothing")
    return {
        row: frozenset(np.flatnonzero(~allowed.astype(bool)).tolist())
        for row, allowed in zip(rows, is_allowed, strict=True)
    }


def require(condition: bool, message: str) -> None:
    if not condition:
        raise WorkerViolationError(message)
