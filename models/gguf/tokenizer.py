"""Makes the tokenizer's JSON files out of a file's metadata.

Source: github.com/ggml-org/llama.cpp, src/llama-vocab.cpp and gguf-py/gguf/constants.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.gguf.errors import GgufError
from models.gguf.metadata import ARCHITECTURE_KEY
from models.gguf.model import GgufModel
from models.tokenizers.errors import TokenizerFormatError
from models.tokenizers.pre_tokenizers import PRE_TOKENIZERS
from models.tokenizers.sentencepiece import sentencepiece_parts, spelled
from models.tokenizers.tokenizer_json import (
    added_token,
    byte_level_parts,
    ends_added,
    tokenizer_json,
)

PREFIX = "tokenizer.ggml."
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_TEMPLATE = "tokenizer.chat_template"
_TEMPLATES = "tokenizer.chat_templates"
_NAMES = ("bos", "eos", "unknown", "padding")
_CONFIG_NAMES = {"unknown": "unk", "padding": "pad"}
_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>")
"""Control tokens that end a turn, which some files do not list."""


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """The fields `tokenizer.*` of a file, with their types checked."""

    model: GgufModel
    tokens: list[str]
    kinds: list[int]

    @classmethod
    def read(cls, model: GgufModel) -> "GgufTokenizer":
        """Checks the tables.

        Raises:
            GgufError: one is missing or ill-typed.
        """
        tokens = _table(model, "tokens", str)
        kinds = _table(model, "token_type", int) if _has(model, "token_type") else [1] * len(tokens)
        if len(kinds) != len(tokens):
            raise GgufError(f"{model.path}: {len(tokens)} tokens have {len(kinds)} types")
        return cls(model, tokens, kinds)

    def tokenizer_json(self) -> dict[str, Any]:
        """Returns tokenizer.json.

        Raises:
            GgufError: the kind of tokenizer is not supported, or a field is ill-typed.
        """
        kind = self._get("model")
        if kind == "gpt2":
            parts = self._byte_level()
        elif kind == "llama":
            parts = self._sentencepiece()
        else:
            raise self._error("model", kind, "gpt2 (byte-level BPE) or llama (SentencePiece)")
        return tokenizer_json(
            parts | {"post_processor": self._ends_added() or parts.get("post_processor")},
            self._added_tokens(),
        )

    def config_json(self) -> dict[str, Any]:
        """Returns tokenizer_config.json, with the chat templates."""
        config: dict[str, Any] = {**self.named(), "clean_up_tokenization_spaces": False}
        template = self.model.metadata.get(_TEMPLATE)
        named = self.model.metadata.get(_TEMPLATES)
        others = {
            name: self.model.metadata.get(f"{_TEMPLATE}.{name}")
            for name in (named if isinstance(named, list) else ())
        }
        if others:
            texts = {"default": template, **others}
            config["chat_template"] = [
                {"name": name, "template": text} for name, text in texts.items() if text is not None
            ]
        elif template is not None:
            config["chat_template"] = template
        return config

    def named(self) -> dict[str, str]:
        """Returns the texts of bos_token, eos_token, unk_token and pad_token."""
        ids = {name: self._id(name) for name in _NAMES}
        return {
            f"{_CONFIG_NAMES.get(name, name)}_token": self.tokens[token_id]
            for name, token_id in ids.items()
            if token_id is not None
        }

    def end_ids(self) -> list[int]:
        """Returns the ids that end a text or a turn."""
        ids = {self._id(name) for name in ("eos", "eot", "eom")}
        is_harmony = "<|channel|>" in self.tokens  # where <|end|> ends one of several messages
        for token_id, (text, kind) in enumerate(zip(self.tokens, self.kinds, strict=True)):
            if kind == _CONTROL and text in _ENDS and not (is_harmony and text == "<|end|>"):
                ids.add(token_id)
        return sorted(each for each in ids if each is not None)

    def _byte_level(self) -> dict[str, Any]:
        """Returns the parts of byte-level BPE."""
        name = self._get("pre")
        pre = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
        if pre is None:
            raise self._error("pre", name, f"one of {', '.join(PRE_TOKENIZERS)}")
        return byte_level_parts(
            pre.steps(),
            self._vocabulary(),
            [_pair(merge) for merge in _table(self.model, "merges", str)],
            takes_whole=pre.takes_whole,
            normalizer=pre.normalizer,
        )

    def _sentencepiece(self) -> dict[str, Any]:
        """Returns the parts of SentencePiece."""
        scores = _table(self.model, "scores", float)
        if len(scores) != len(self.tokens):
            raise self._error("scores", len(scores), f"as many as tokens, {len(self.tokens)}")
        architecture = self.model.metadata.get(ARCHITECTURE_KEY)
        if isinstance(architecture, str) and architecture.startswith("gemma"):
            # Its scores do not follow the order of its merges; that of its tokens does.
            scores = [-token_id for token_id in range(len(self.tokens))]
        try:
            return sentencepiece_parts(
                [spelled(token) for token in self.tokens],
                scores,
                self.named().get("unk_token"),
                has_prefix=self._flag("add_space_prefix", default=True),
            )
        except TokenizerFormatError as error:
            raise GgufError(f"{self.model.path}: {error}") from error

    def _vocabulary(self) -> dict[str, int]:
        return {token: token_id for token_id, token in enumerate(self.tokens) if token}

    def _added_tokens(self) -> list[dict[str, Any]]:
        is_added = (_UNKNOWN, _CONTROL, _USER_DEFINED)
        return [
            added_token(token_id, text, is_special=kind != _USER_DEFINED)
            for token_id, (text, kind) in enumerate(zip(self.tokens, self.kinds, strict=True))
            # Runs of spaces are merged like other tokens.
            if kind in is_added and text.strip(" ")
        ]

    def _ends_added(self) -> dict[str, Any] | None:
        """Returns the step that adds the tokens of begin and end; None if there are none."""
        pre = PRE_TOKENIZERS.get(str(self._get("pre")))
        is_sentencepiece = self._get("model") == "llama"
        adds_bos = is_sentencepiece or (pre is not None and pre.adds_bos)
        first = self._added("bos", by_default=adds_bos)
        last = self._added("eos", by_default=False)
        return ends_added(
            *(None if each is None else (each, self.tokens[each]) for each in (first, last))
        )

    def _added(self, name: str, *, by_default: bool) -> int | None:
        return self._id(name) if self._flag(f"add_{name}_token", default=by_default) else None

    def _id(self, name: str) -> int | None:
        value = self._get(f"{name}_token_id")
        if value is None:
            return None
        if type(value) is not int or not 0 <= value < len(self.tokens):
            raise self._error(f"{name}_token_id", value, f"from 0 to {len(self.tokens) - 1}")
        return value

    def _flag(self, name: str, *, default: bool) -> bool:
        value = self._get(name)
        return default if value is None else bool(value)

    def _get(self, name: str) -> Any:
        return self.model.metadata.get(PREFIX + name)

    def _error(self, name: str, value: object, wanted: str) -> GgufError:
        return GgufError(
            f"{self.model.path}: {PREFIX}{name} is {repr(value)[:80]}; it must be {wanted}"
        )


def generation_config(tokenizer: GgufTokenizer) -> Mapping[str, Any]:
    """Returns generation_config.json."""
    return {"eos_token_id": tokenizer.end_ids()}


def _has(model: GgufModel, name: str) -> bool:
    return PREFIX + name in model.metadata


def _table(model: GgufModel, name: str, kind: type) -> list[Any]:
    """Reads a list whose elements are all of one type."""
    value = model.metadata.get(PREFIX + name)
    if not isinstance(value, list) or not all(type(each) is kind for each in value):
        raise GgufError(f"{model.path}: {PREFIX}{name} is no list of {kind.__name__}")
    return value


def _pair(merge: str) -> list[str]:
    """Returns the two tokens of a merge; the first one may begin with a space."""
    place = merge.find(" ", 1)
    return [merge[:place], merge[place + 1 :]] if place > 0 else [merge, ""]
