"""The tokenizer files of a model, from the engine or a folder, and their hash."""

import asyncio
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from protos.engine.v1.engine_pb2 import GetTokenizerRequest
from services.frontend.errors import EngineUnavailableError
from services.settings.regular_file import read_regular_file

TOKENIZER_TIMEOUT_S = 60.0

TOKENIZER_FILE_BYTES = {
    "added_tokens.json": 2**24,
    "additional_chat_templates/default.jinja": 2**20,
    "additional_chat_templates/tool_use.jinja": 2**20,
    "chat_template.jinja": 2**20,
    "special_tokens_map.json": 2**20,
    "tokenizer.json": 2**26,
    "tokenizer_config.json": 2**24,
}
"""Tokenizer files -> their size limits in bytes, the same as the engine's."""

TokenizerFiles = Mapping[str, bytes]
"""Content by file name."""


class TokenizerStore:
    """Reads the tokenizer that the engines need, and keeps it."""

    def __init__(self, folder: Path | None) -> None:
        """Reads nothing yet."""
        self._folder = folder
        self._files: TokenizerFiles = {}

    async def read(self, stub: Any, sha256: str) -> TokenizerFiles:
        """Returns the files with this hash.

        Raises:
            EngineUnavailableError: the files have another hash or cannot be read.
            grpc.aio.AioRpcError: the engine did not answer.
        """
        if tokenizer_sha256(self._files) == sha256:
            return self._files
        if self._folder is None:
            files = await fetch_tokenizer_files(stub, timeout_s=TOKENIZER_TIMEOUT_S)
        else:
            try:
                files = await asyncio.to_thread(read_tokenizer_files, self._folder)
            except OSError as error:
                raise EngineUnavailableError(
                    f"the tokenizer cannot be read: {error.filename}: {error.strerror}"
                ) from error
        found = tokenizer_sha256(files)
        if found != sha256:
            raise EngineUnavailableError(
                f"the tokenizer from {self._folder or 'the engine'} has the hash {found[:12]}, the"
                f" engine's model needs {sha256[:12]}"
            )
        self._files = files
        return files


async def fetch_tokenizer_files(stub: Any, *, timeout_s: float) -> TokenizerFiles:
    """Fetches the files from the engine.

    Raises:
        EngineUnavailableError: a file is unknown or over its limit.
        grpc.aio.AioRpcError: the engine did not answer in time.
    """
    files: dict[str, bytearray] = {}
    async for part in stub.GetTokenizer(GetTokenizerRequest(), timeout=timeout_s):
        content = files.setdefault(part.file_name, bytearray())
        content += part.content
        _check_size(part.file_name, len(content))
    return {name: bytes(content) for name, content in files.items()}


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Reads the files in a folder.

    Raises:
        OSError: a file cannot be read or is over its limit.
    """
    return {
        name: read_regular_file(folder / name, max_bytes=limit)
        for name, limit in TOKENIZER_FILE_BYTES.items()
        if (folder / name).exists()
    }


def _check_size(name: str, num_bytes: int) -> None:
    limit = TOKENIZER_FILE_BYTES.get(name)
    if limit is None:
        raise EngineUnavailableError(f"the tokenizer from the engine has a file {name[:80]!r}")
    if num_bytes > limit:
        raise EngineUnavailableError(
            f"{name} from the engine has {num_bytes} bytes or more; the limit is {limit}"
        )


def tokenizer_sha256(files: TokenizerFiles) -> str:
    """Returns the hexadecimal hash that the engine states in GetModelInfo.

    It covers, by name, each file's name, NUL, eight bytes of little-endian length, and content.
    """
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(name.encode() + b"\0" + len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.hexdigest()
