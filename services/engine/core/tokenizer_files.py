"""The tokenizer's files as one hashed bundle, so that a frontend needs no copy of its own."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

TOKENIZER_FILE_NAMES = (
    "added_tokens.json",
    "additional_chat_templates/default.jinja",
    "additional_chat_templates/tool_use.jinja",
    "chat_template.jinja",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
"""Files that make up a tokenizer, where a checkpoint has them."""


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
        """Reads the files that exist in `folder`."""
        files = tuple(
            TokenizerFile(name, (folder / name).read_bytes())
            for name in sorted(TOKENIZER_FILE_NAMES)
            if (folder / name).is_file()
        )
        return cls(files, _sha256(files))


def _sha256(files: tuple[TokenizerFile, ...]) -> str:
    """Hashes name, NUL, eight bytes of little-endian length and content of each file."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + len(file.content).to_bytes(8, "little"))
        digest.update(file.content)
    return digest.hexdigest()
