"""Mistral's tekken.json as tokenizer.json.

Source: github.com/mistralai/mistral-common, src/mistral_common/tokens/tokenizers/tekken.py.
"""

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any

from models.tokenizers.byte_ranks import check_bytes, merges, spelled
from models.tokenizers.errors import TokenizerFormatError
from models.tokenizers.pre_tokenizers import PreTokenizer
from models.tokenizers.tokenizer_json import (
    added_token,
    byte_level_parts,
    ends_added,
    tokenizer_json,
)

BOS, EOS = "<s>", "</s>"
_MAX_SPECIAL = 2**13


def read_tekken(content: bytes) -> dict[str, Any]:
    """Returns tokenizer.json.

    Special tokens have the first ids, and the others follow by their ranks.

    Raises:
        TokenizerFormatError: it is damaged, has no token for a byte, or is of a version without a
            table of special tokens.
    """
    try:
        whole = json.loads(content)
        pattern = whole["config"]["pattern"]
        num_special = whole["config"]["default_num_special_tokens"]
        size = whole["config"]["default_vocab_size"]
        special = {each["rank"]: each["token_str"] for each in whole["special_tokens"]}
        tokens = [base64.b64decode(each["token_bytes"], validate=True) for each in whole["vocab"]]
        order = [each["rank"] for each in whole["vocab"]]
    except (ValueError, TypeError, KeyError, RecursionError, binascii.Error) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise TokenizerFormatError(f"it cannot be read: {reason}") from error
    _check(pattern, num_special, size, special)
    if order != list(range(len(tokens))) or len(set(tokens)) != len(tokens):
        raise TokenizerFormatError("its tokens are not in the order of their ranks, or come twice")
    ranks = {token: rank for rank, token in enumerate(tokens[: size - num_special])}
    check_bytes(ranks)
    ids = {spelled(token): num_special + rank for token, rank in ranks.items()}
    texts = [special.get(token_id, f"<SPECIAL_{token_id}>") for token_id in range(num_special)]
    parts = byte_level_parts(PreTokenizer((pattern,)).steps(), ids, merges(ranks), takes_whole=True)
    parts["post_processor"] = ends_added((texts.index(BOS), BOS) if BOS in texts else None, None)
    added = [added_token(token_id, text, is_special=True) for token_id, text in enumerate(texts)]
    return tokenizer_json(parts, added)


def tekken_config() -> dict[str, str]:
    """Returns tokenizer_config.json of a model that has none."""
    return {"bos_token": BOS, "eos_token": EOS}


def _check(pattern: object, num_special: object, size: object, special: Mapping[Any, Any]) -> None:
    if not isinstance(pattern, str):
        raise TokenizerFormatError("config.pattern is no text")
    if not isinstance(num_special, int) or not isinstance(size, int):
        raise TokenizerFormatError("its numbers of tokens are no integers")
    if not 0 < num_special <= min(size, _MAX_SPECIAL):
        raise TokenizerFormatError(f"{num_special} of {size} tokens cannot be special")
    for rank, text in special.items():
        if not isinstance(rank, int) or not 0 <= rank < num_special or not isinstance(text, str):
            raise TokenizerFormatError(f"a special token has the rank {str(rank)[:80]}")
