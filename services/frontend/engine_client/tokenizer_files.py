"""The files of the model's tokenizer, from the engine or from a folder, and their hash."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from protos.engine.v1.engine_pb2 import GetTokenizerRequest

TOKENIZER_FILE_NAMES = (
    "added_tokens.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
"""Files that make up a tokenizer, where a checkpoint has them; the engine hashes the same ones."""

TokenizerFiles = Mapping[str, bytes]
"""Content by file name."""


async def fetch_tokenizer_files(stub: Any, *, timeout_s: float) -> TokenizerFiles:
    """Reads the files from the engine.

    Raises:
        grpc.aio.AioRpcError: the engine did not answer in time.
    """
    parts: dict[str, list[bytes]] = {}
    async for part in stub.GetTokenizer(GetTokenizerRequest(), timeout=timeout_s):
        parts.setdefault(part.file_name, []).append(part.content)
    return {name: b"".join(contents) for name, contents in parts.items()}


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Reads the files that a folder has."""
    return {
        name: (folder / name).read_bytes()
        for name in TOKENIZER_FILE_NAMES
        if (folder / name).is_file()
    }


def tokenizer_sha256(files: TokenizerFiles) -> str:
    """Returns the hash that the engine states in GetModelInfo, in hexadecimal.

    It runs over name, NUL, eight bytes of little-endian length and content of each file, in the
    order of their names.
    """
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(name.encode() + b"\0" + len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.hexdigest()
