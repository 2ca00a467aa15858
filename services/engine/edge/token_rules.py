"""Reads which tokens a request may choose, and which sequences it may not."""

from typing import Any

import numpy as np

from protos.common.v1 import sampling_pb2
from services.engine.errors import InvalidRequestError
from services.engine.request import MAX_ALLOWED_TOKEN_IDS, MAX_FORBIDDEN_TOKENS

ALLOWED, FORBIDDEN = "allowed_token_ids", "forbidden_sequences"


def read_token_rules(given: sampling_pb2.SamplingParams, vocab_size: int) -> dict[str, Any]:
    """Returns the fields of `SamplingParams` with the rules.

    Raises:
        InvalidRequestError: a list is too long, a sequence is empty, a token is not in the
            vocabulary, or no token is left.
    """
    banned, sequences = _forbidden(given, vocab_size)
    if len(banned) >= vocab_size:
        raise InvalidRequestError(
            "forbidden_sequences has every token, each by itself", field=FORBIDDEN
        )
    allowed = None
    if given.allowed_token_ids:
        allowed = _allowed(given, vocab_size)
        if banned.issuperset(given.allowed_token_ids):
            raise InvalidRequestError(
                "forbidden_sequences has each of the allowed_token_ids", field=FORBIDDEN
            )
    return {
        "banned_token_ids": banned,
        "forbidden_sequences": sequences,
        "allowed_tokens": allowed,
    }


def _allowed(given: sampling_pb2.SamplingParams, vocab_size: int) -> bytes:
    """Returns the allowed tokens as bits."""
    num_ids = len(given.allowed_token_ids)
    if num_ids > MAX_ALLOWED_TOKEN_IDS:
        raise InvalidRequestError(
            f"allowed_token_ids has {num_ids} entries; the limit is {MAX_ALLOWED_TOKEN_IDS}",
            field=ALLOWED,
        )
    ids = np.fromiter(given.allowed_token_ids, np.int64, num_ids)
    check_token_id(ALLOWED, int(ids.max()), vocab_size)
    is_allowed = np.zeros(32 * -(-vocab_size // 32), np.uint8)
    is_allowed[ids] = 1
    return np.packbits(is_allowed, bitorder="little").tobytes()


def _forbidden(
    given: sampling_pb2.SamplingParams, vocab_size: int
) -> tuple[frozenset[int], tuple[tuple[int, ...], ...]]:
    """Returns the sequences of one token, and those of several that have none of these."""
    num_tokens = 0
    for sequence in given.forbidden_sequences:
        if not sequence.token_ids:
            raise InvalidRequestError("forbidden_sequences has an empty sequence", field=FORBIDDEN)
        num_tokens += len(sequence.token_ids)
        if num_tokens > MAX_FORBIDDEN_TOKENS:
            raise InvalidRequestError(
                f"forbidden_sequences has over {MAX_FORBIDDEN_TOKENS} tokens, which is the limit",
                field=FORBIDDEN,
            )
        check_token_id(FORBIDDEN, max(sequence.token_ids), vocab_size)
    sequences = {tuple(sequence.token_ids) for sequence in given.forbidden_sequences}
    banned = frozenset(sequence[0] for sequence in sequences if len(sequence) == 1)
    return banned, tuple(sorted(each for each in sequences if banned.isdisjoint(each)))


def check_token_id(what: str, largest: int, vocab_size: int) -> None:
    """Raises InvalidRequestError unless a token id is in the vocabulary."""
    if largest >= vocab_size:
        raise InvalidRequestError(
            f"{what} has the token id {largest}; ids are below {vocab_size}", field=what
        )
