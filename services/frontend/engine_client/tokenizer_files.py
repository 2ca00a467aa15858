"""The files of the model's tokenizer, from the engine or from a folder, and their hash."""

import asyncio
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from protos.engine.v1.engine_pb2 import GetTokenizerRequest
from services.frontend.errors import EngineUnavailableError

TOKENIZER_TIMEOUT_S = 60.0

TOKENIZER_FILE_NAMES = (
    "added_tokens.json",
    "additional_chat_templates/default.jinja",
    "additional_chat_templates/tool_use.jinja",
    "chat_template.jinja",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
"""Files that make up a tokenizer, where a checkpoint has them; the engine hashes the same ones."""

TokenizerFiles = Mapping[str, bytes]
"""Content by file name."""


class TokenizerStore:
    """The tokenizer that engines need, read once for all that need the same."""

    def __init__(self, folder: Path | None) -> None:
        """Reads nothing yet.

        Args:
            folder: where the files are; fetched from an engine when None.
        """
        self._folder = folder
        self._files: TokenizerFiles = {}

    async def read(self, stub: Any, sha256: str) -> TokenizerFiles:
        """Returns the files with this hash, if need be from the engine behind `stub`.

        Raises:
            EngineUnavailableError: what was found has another hash.
            grpc.aio.AioRpcError: the engine did not answer.
        """
        if tokenizer_sha256(self._files) == sha256:
            return self._files
        if self._folder is None:
            files = await fetch_tokenizer_files(stub, timeout_s=TOKENIZER_TIMEOUT_S)
        else:
            files = await asyncio.to_thread(read_tokenizer_files, self._folder)
        found = tokenizer_sha256(files)
        if found != sha256:
            raise EngineUnavailableError(
                f"the tokenizer from {self._folder or 'the engine'} has the hash {found[:12]}, the"
                f" engine's model needs {sha256[:12]}"
            )
        self._files = files
        return files


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
