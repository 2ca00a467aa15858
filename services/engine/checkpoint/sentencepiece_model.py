"""SentencePiece's tokenizer.model as tokenizer.json.

Source: Kudo and Richardson 2018, "SentencePiece"; its byte pairs are merged by their scores.
"""

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from models.tokenizers.errors import TokenizerFormatError
from models.tokenizers.sentencepiece import sentencepiece_parts
from models.tokenizers.tokenizer_json import added_token, ends_added, tokenizer_json
from protos.sentencepiece.v1.model_pb2 import Model, NormalizerSpec

_BYTE_PAIRS = 2
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_MERGED = (0, 1)
"""Types of pieces that are made of others."""
_MAX_WHOLE = 2**14
_BOS_ID, _EOS_ID = 1, 2
"""Where the file does not say."""


def read_sentencepiece(
    content: bytes, added_tokens: Sequence[Mapping[str, Any]], config: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns tokenizer.json.

    Args:
        content: of tokenizer.model.
        added_tokens: entries of `added_tokens`, which count more than the file's.
        config: tokenizer_config.json, which says whether texts get tokens of begin and end, and
            what gets a space in front.

    Raises:
        TokenizerFormatError: it is no such file, damaged, or its vocabulary is not one of byte
            pairs.
    """
    try:
        model = Model.FromString(content)
    except DecodeError as error:
        raise TokenizerFormatError("it is no SentencePiece model") from error
    if not model.pieces:
        raise TokenizerFormatError("it is no SentencePiece model with pieces")
    if model.trainer_spec.model_type != _BYTE_PAIRS:
        raise TokenizerFormatError("its vocabulary is not one of byte pairs, as an LLM's is")
    _check(model)
    texts = [each.piece for each in model.pieces]
    unknown = next((each.piece for each in model.pieces if each.type == _UNKNOWN), None)
    spec = model.normalizer_spec
    parts = sentencepiece_parts(
        texts,
        [each.score if each.type in _MERGED else -math.inf for each in model.pieces],
        unknown,
        has_prefix=_has_prefix(spec, config),
        prefixes_once=config.get("legacy") is False,
        has_bytes=model.trainer_spec.byte_fallback,
        whole=[each.piece for each in model.pieces if each.type == _USER_DEFINED and each.piece],
        normalizers=_normalizers(spec),
    )
    added = {
        number: added_token(number, each.piece, is_special=True)
        for number, each in enumerate(model.pieces)
        if each.type in (_UNKNOWN, _CONTROL) and each.piece.strip("\u2581")
    } | {each["id"]: each for each in added_tokens}
    parts["post_processor"] = _ends(model, added, config)
    return tokenizer_json(parts, [added[number] for number in sorted(added)])


def _check(model: Model) -> None:
    if any(math.isnan(each.score) for each in model.pieces):
        raise TokenizerFormatError("a piece's score is no number")
    merged = [each.piece for each in model.pieces if each.type in _MERGED]
    if len(set(merged)) != len(merged):
        raise TokenizerFormatError("a piece comes twice")
    if sum(each.type == _USER_DEFINED for each in model.pieces) > _MAX_WHOLE:
        raise TokenizerFormatError(f"it has more than {_MAX_WHOLE} pieces defined by a user")


def _has_prefix(spec: NormalizerSpec, config: Mapping[str, Any]) -> bool:
    """Returns whether texts get a space in front; tokenizer_config.json counts more."""
    given = config.get("add_prefix_space")
    if isinstance(given, bool):
        return given
    return not spec.HasField("add_dummy_prefix") or spec.add_dummy_prefix


def _normalizers(spec: NormalizerSpec) -> list[dict[str, Any]]:
    """Returns what happens to a text before its spaces are spelled."""
    found: list[dict[str, Any]] = []
    if spec.precompiled_charsmap:
        table = base64.b64encode(spec.precompiled_charsmap).decode()
        found.append({"type": "Precompiled", "precompiled_charsmap": table})
    if not spec.HasField("remove_extra_whitespaces") or spec.remove_extra_whitespaces:
        found += [
            {"type": "Replace", "pattern": {"Regex": r"\A +| +\z"}, "content": ""},
            {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
        ]
    return found


def _ends(
    model: Model, added: Mapping[int, Mapping[str, Any]], config: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Returns the step that adds tokens of begin and end: by default, that of begin."""
    spec, ends = model.trainer_spec, []
    for name, token_id, default in (
        ("bos", spec.bos_id if spec.HasField("bos_id") else _BOS_ID, True),
        ("eos", spec.eos_id if spec.HasField("eos_id") else _EOS_ID, False),
    ):
        given = config.get(f"add_{name}_token")
        is_wanted = default if given is None else bool(given)
        ends.append(
            (token_id, added[token_id]["content"]) if is_wanted and token_id in added else None
        )
    return ends_added(*ends)
