"""Makes tokenizer.json for a model folder that has its tokenizer in another format."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from models.tokenizers.errors import TokenizerFormatError
from models.tokenizers.tekken import read_tekken, tekken_config
from models.tokenizers.tiktoken import read_tiktoken
from models.tokenizers.tokenizer_json import added_token
from services.engine.checkpoint.model_files import ModelFolderError, read_bounded, require_inside
from services.engine.checkpoint.sentencepiece_model import read_sentencepiece

_Config: TypeAlias = Mapping[str, Any]
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def make_tokenizer(folder: Path, config_json: bytes | None) -> dict[str, bytes]:
    """Returns the files that a folder lacks, by their names; none if it has no tokenizer at all.

    Args:
        folder: without a tokenizer.json.
        config_json: its tokenizer_config.json; None without.

    Raises:
        ModelFolderError: a file is too large, a link out of the folder, damaged, or of a kind that
            tokenizer.json cannot say.
    """
    for name, (max_bytes, convert) in _FORMATS.items():
        path = folder / name
        if not path.is_file():
            continue
        require_inside(path, folder)
        content = read_bounded(path, max_bytes)
        try:
            config = _read_config(config_json)
            made = {"tokenizer.json": convert(content, config)}
        except TokenizerFormatError as error:
            raise ModelFolderError(f"{path}: {error}") from error
        if name == "tekken.json" and config_json is None:
            made["tokenizer_config.json"] = tekken_config()
        return {each: json.dumps(value).encode() for each, value in made.items()}
    return {}


def _read_config(content: bytes | None) -> _Config:
    try:
        config = json.loads(content or b"{}")
    except (ValueError, RecursionError) as error:
        raise TokenizerFormatError(f"tokenizer_config.json cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise TokenizerFormatError("tokenizer_config.json does not hold a JSON object")
    return config


def _added_tokens(config: _Config) -> list[dict[str, Any]]:
    """Returns `added_tokens_decoder` of tokenizer_config.json in the form of tokenizer.json."""
    tokens = []
    try:
        for token_id, given in config.get("added_tokens_decoder", {}).items():
            token = added_token(int(token_id), given["content"], is_special=False)
            tokens.append(token | {name: given[name] for name in _FLAGS if name in given})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TokenizerFormatError(
            "added_tokens_decoder of tokenizer_config.json has a malformed token"
        ) from error
    for token in tokens:
        if not isinstance(token["content"], str) or not all(type(token[n]) is bool for n in _FLAGS):
            raise TokenizerFormatError(
                f"added_tokens_decoder of tokenizer_config.json has the malformed token "
                f"{token['id']}"
            )
    return sorted(tokens, key=lambda token: int(token["id"]))


_FORMATS: Mapping[str, tuple[int, Callable[[bytes, _Config], dict[str, Any]]]] = {
    "tekken.json": (2**26, lambda content, _: read_tekken(content)),
    "tiktoken.model": (
        2**24,
        lambda content, config: read_tiktoken(content, _added_tokens(config)),
    ),
    "tokenizer.model": (
        2**24,
        lambda content, config: read_sentencepiece(content, _added_tokens(config), config),
    ),
}
"""Name of a file -> most bytes of it, and what makes tokenizer.json, in the order of preference."""
