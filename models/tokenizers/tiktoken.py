"""Kimi's tiktoken.model as tokenizer.json.

The file has tokens and their ranks, and nothing else. How texts are split is known for Kimi's
vocabulary alone; the special tokens are in tokenizer_config.json.
Source: huggingface.co/moonshotai/Kimi-K2-Instruct, tokenization_kimi.py.
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

from models.tokenizers.byte_ranks import check_bytes, merges, spelled
from models.tokenizers.errors import TokenizerFormatError
from models.tokenizers.pre_tokenizers import PRE_TOKENIZERS
from models.tokenizers.tokenizer_json import byte_level_parts, tokenizer_json


def read_tiktoken(content: bytes, added_tokens: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns tokenizer.json.

    Args:
        content: of tiktoken.model.
        added_tokens: entries of `added_tokens`.

    Raises:
        TokenizerFormatError: a line is no token and rank, a token or rank comes twice, or a byte
            is no token.
    """
    ranks: dict[bytes, int] = {}
    try:
        for line in content.splitlines():
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (ValueError, binascii.Error) as error:
        raise TokenizerFormatError(f"line {len(ranks) + 1} is no token and rank") from error
    if len(set(ranks.values())) != content.count(b"\n") + (content[-1:] not in (b"", b"\n")):
        raise TokenizerFormatError("a token or a rank comes twice")
    check_bytes(ranks)
    pre = PRE_TOKENIZERS["kimi-k2"]
    ids = {spelled(token): rank for token, rank in ranks.items()}
    parts = byte_level_parts(pre.steps(), ids, merges(ranks), takes_whole=pre.takes_whole)
    return tokenizer_json(parts, added_tokens)
