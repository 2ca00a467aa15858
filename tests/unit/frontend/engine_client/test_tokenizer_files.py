"""An engine cannot fill a frontend's memory with a tokenizer's files."""

import os

import pytest

from protos.engine.v1.engine_pb2 import GetTokenizerResponse
from services.frontend.engine_client.tokenizer_files import (
    TOKENIZER_FILE_BYTES,
    fetch_tokenizer_files,
    read_tokenizer_files,
)
from services.frontend.errors import EngineUnavailableError


class Engine:
    """Sends parts of files and counts them."""

    def __init__(self, *parts):
        self._parts = parts
        self.num_sent = 0

    async def GetTokenizer(self, request, *, timeout):  # noqa: N802  # a stub's
        for name, content in self._parts:
            self.num_sent += 1
            yield GetTokenizerResponse(file_name=name, content=content)


async def fetch(engine):
    return await fetch_tokenizer_files(engine, timeout_s=60)


async def test_files_come_in_parts():
    engine = Engine(
        ("tokenizer.json", b"{"), ("chat_template.jinja", b"x"), ("tokenizer.json", b"}")
    )
    assert await fetch(engine) == {"tokenizer.json": b"{}", "chat_template.jinja": b"x"}


async def test_a_template_of_100_mb_is_not_read_to_its_end():
    engine = Engine(*[("chat_template.jinja", b" " * 2**20)] * 100)
    with pytest.raises(EngineUnavailableError, match="jinja from the engine has"):
        await fetch(engine)
    assert engine.num_sent == 2


async def test_a_file_that_is_none_of_a_tokenizers_is_refused():
    with pytest.raises(EngineUnavailableError, match="has a file 'xxx"):
        await fetch(Engine(("x" * 10_000, b"")))


def test_a_folders_files_have_the_same_limits(tmp_path):
    for name, limit in TOKENIZER_FILE_BYTES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, limit + 1)
        with pytest.raises(OSError, match=f"over the limit of {limit} bytes"):
            read_tokenizer_files(tmp_path)
        (tmp_path / name).unlink()
