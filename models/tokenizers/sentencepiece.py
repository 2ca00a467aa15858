"""A SentencePiece vocabulary with scores, as BPE with merges, the way transformers converts it.

Source: github.com/huggingface/transformers, src/transformers/convert_slow_tokenizer.py.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from models.tokenizers.errors import check_merges

_SPACE = "\u2581"
MAX_TOKEN_CHARACTERS = 512
"""Longer tokens are not split: merges for each of their splits would take long."""


def spelled(token: str) -> str:
    """Returns a token as a vocabulary spells it; Gemma's files have runs of spaces as they are."""
    return token if token.strip(" ") else token.replace(" ", _SPACE)


def sentencepiece_parts(
    tokens: Sequence[str],
    ranks: Sequence[float],
    unknown: str | None,
    *,
    has_prefix: bool,
    prefixes_once: bool = False,
    has_bytes: bool = True,
    whole: Sequence[str] = (),
    normalizers: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Returns normalizer, pre_tokenizer, decoder and model of tokenizer.json.

    Args:
        tokens: in the vocabulary's spelling.
        ranks: of each token; of two possible merges, that into the higher one comes first. Minus
            infinity: nothing is merged into it.
        unknown: the token for what no other one spells.
        has_prefix: whether texts get a space in front.
        prefixes_once: whether only what begins a text gets it, and not what follows an added token.
        has_bytes: whether what no token spells becomes tokens of its bytes.
        whole: tokens that are taken wherever their text is, and never merged.
        normalizers: before spaces are spelled.

    Raises:
        TokenizerFormatError: too many pairs of tokens make a token.
    """
    vocabulary = {token: token_id for token_id, token in enumerate(tokens) if token}
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prefix = [{"type": "Prepend", "prepend": _SPACE}] if has_prefix and not prefixes_once else []
    steps: list[dict[str, Any]] = []
    if has_prefix and prefixes_once:
        first = {"replacement": _SPACE, "prepend_scheme": "first", "split": False}
        steps.append({"type": "Metaspace", **first})
    if whole:
        texts = "|".join(map(re.escape, sorted(whole, key=len, reverse=True)))
        isolated = {"pattern": {"Regex": texts}, "behavior": "Isolated", "invert": False}
        steps.append({"type": "Split", **isolated})
    without_prefix = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    decoders = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        *(without_prefix if has_prefix else []),
    ]
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*normalizers, *prefix, spaces]},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps} if steps else None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": unknown,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": has_bytes,
            "ignore_merges": bool(whole),
            "vocab": vocabulary,
            "merges": _merges(vocabulary, ranks),
        },
    }


def _merges(vocabulary: dict[str, int], ranks: Sequence[float]) -> list[list[str]]:
    """Returns all pairs of tokens that together are a token, that with the highest rank first."""
    found: list[tuple[float, str, str]] = []
    for token, token_id in vocabulary.items():
        if len(token) > MAX_TOKEN_CHARACTERS or ranks[token_id] == -math.inf:
            continue
        check_merges(len(found))
        pairs = [
            (token[:place], token[place:])
            for place in range(1, len(token))
            if token[:place] in vocabulary and token[place:] in vocabulary
        ]
        pairs.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        found += [(ranks[token_id], left, right) for left, right in pairs]
    found.sort(key=lambda each: (each[0], len(each[1]), len(each[2])), reverse=True)
    return [[left, right] for _, left, right in found]
