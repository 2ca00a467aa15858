"""The tokenizer's files as one hashed bundle, which frontends fetch from the engine."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.config_sections.fields import shown
from services.engine.checkpoint.made_tokenizer import make_tokenizer
from services.engine.checkpoint.model_files import ModelFolderError, read_bounded, require_inside

TOKENIZER_FILE_BYTES = {
    "added_tokens.json": 2**24,
    "additional_chat_templates/default.jinja": 2**20,
    "additional_chat_templates/tool_use.jinja": 2**20,
    "chat_template.jinja": 2**20,
    "special_tokens_map.json": 2**20,
    "tokenizer.json": 2**26,
    "tokenizer_config.json": 2**24,
}
"""Files that a tokenizer may have -> most bytes of each.

At least twice the sizes in released models: 33 MB of tokenizer.json, 1.2 MB of
tokenizer_config.json.
"""

MAX_TOKENS_BEYOND = 2**16
"""Most ids above the model's vocabulary: tables have an entry for each id up to the largest."""


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """One file of the tokenizer."""

    name: str
    content: bytes


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """All files of the tokenizer, in the order of their names, and their common hash."""

    files: tuple[TokenizerFile, ...]
    sha256: str

    @classmethod
    def from_folder(cls, folder: Path) -> "TokenizerFiles":
        """Reads the files that exist in `folder`; makes tokenizer.json out of another format.

        Raises:
            ModelFolderError: one is too large, no regular file, a link out of the folder, or of
                another format and damaged, or made too large.
        """
        files = []
        for name, max_bytes in sorted(TOKENIZER_FILE_BYTES.items()):
            path = folder / name
            if path.exists() or path.is_symlink():
                require_inside(path, folder)
                files.append(TokenizerFile(name, read_bounded(path, max_bytes)))
        contents = {file.name: file.content for file in files}
        if "tokenizer.json" not in contents:
            made = make_tokenizer(folder, contents.get("tokenizer_config.json"))
            for name, content in made.items():
                if len(content) > TOKENIZER_FILE_BYTES[name]:
                    raise ModelFolderError(
                        f"{folder}: the {name} made of its tokenizer has {len(content)} bytes; the "
                        f"limit is {TOKENIZER_FILE_BYTES[name]}"
                    )
                files.append(TokenizerFile(name, content))
            files.sort(key=lambda file: file.name)
        return cls(tuple(files), _sha256(tuple(files)))

    def content(self, name: str) -> bytes | None:
        """Returns a file's content; None if there is no such file."""
        return next((file.content for file in self.files if file.name == name), None)


def check_token_ids(files: TokenizerFiles, folder: Path, vocab_size: int) -> None:
    """Checks the ids of a tokenizer's tokens before tables of that size are allocated.

    Args:
        files: with a tokenizer.json.
        folder: for messages.
        vocab_size: the model's.

    Raises:
        ModelFolderError: tokenizer.json is not a JSON object, or an id is not an integer from 0
            to vocab_size + MAX_TOKENS_BEYOND - 1.
    """
    path = folder / "tokenizer.json"
    where = path if path.is_file() else f"the tokenizer of {folder}"
    try:
        content = json.loads(files.content("tokenizer.json") or b"")
    except (ValueError, RecursionError) as error:
        raise ModelFolderError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelFolderError(f"{path} does not hold a JSON object")
    limit = vocab_size + MAX_TOKENS_BEYOND
    for token_id in _token_ids(content):
        if type(token_id) is not int or not 0 <= token_id < limit:
            raise ModelFolderError(
                f"{where}: a token has the id {shown(token_id)}; ids are below {limit} where the "
                f"model has {vocab_size} tokens"
            )


def end_token_id(files: TokenizerFiles) -> int | None:
    """Returns the id of `eos_token` in tokenizer_config.json; None if it names no token.

    Args:
        files: with a tokenizer.json that `check_token_ids` has passed.
    """
    try:
        config = json.loads(files.content("tokenizer_config.json") or b"{}")
        end = config.get("eos_token")
    except (ValueError, AttributeError, RecursionError):  # frontends refuse its chats with a reason
        return None
    text = end.get("content") if isinstance(end, dict) else end
    if not isinstance(text, str):
        return None
    content = json.loads(files.content("tokenizer.json") or b"{}")
    model, added = content.get("model"), content.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids: dict[str, int] = dict(vocabulary) if isinstance(vocabulary, dict) else {}
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict) and isinstance(token.get("content"), str):
            ids[token["content"]] = token["id"]
    return ids.get(text)


def _token_ids(content: dict[str, Any]) -> Iterator[object]:
    """Yields the ids of all tokens from each form of tokenizer.json."""
    model = content.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        yield from vocabulary.values()
    elif isinstance(vocabulary, list):  # ids are positions in the list
        yield max(len(vocabulary) - 1, 0)
    added = content.get("added_tokens")
    for token in added if isinstance(added, list) else ():
        yield token.get("id") if isinstance(token, dict) else token


def _sha256(files: tuple[TokenizerFile, ...]) -> str:
    """Hashes name, NUL, eight bytes of little-endian length and content of each file."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + len(file.content).to_bytes(8, "little"))
        digest.update(file.content)
    return digest.hexdigest()
