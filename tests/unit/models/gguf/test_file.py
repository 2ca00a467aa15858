"""Hostile files are refused in one line, and within little memory."""

import os
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.gguf.checkpoint_files import checkpoint_files
from models.gguf.errors import GgufError
from models.gguf.file import MAX_FIELDS, MAX_ITEMS, MAX_TENSORS, read_gguf
from models.gguf.metadata import Metadata
from models.gguf.model import open_gguf
from models.gguf.tensors import sources
from tests.support.gguf_files import byte_tokenizer, write_tensors

MAX_MEMORY = 2**22
LLAMA = {
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 32,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Returns the bytes of a small file, and a path to write others to."""
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    tensors = {
        "token_embd.weight": np.zeros((40, 32), np.float32),
        "blk.0.attn_q.weight": np.zeros((32, 32), np.float32),
        "rope_freqs.weight": np.ones(4, np.float32),
    }
    write_tensors(path, "llama", LLAMA | byte_tokenizer(40), tensors, "Q8_0")
    return path.read_bytes(), path.with_name("other.gguf")


def read_all(path):
    """Does what an engine does with a file before it allocates weights."""
    model = open_gguf([path])
    checkpoint_files(model)
    return sources(Metadata(model), 1)


def read_within_limits(path, content):
    """Reads a file; returns the refusal, if it is refused."""
    path.write_bytes(content)
    tracemalloc.start()
    refusal = None
    try:
        read_all(path)
    except GgufError as error:
        refusal = str(error)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < MAX_MEMORY
    assert "\n" not in (refusal or "")
    return refusal


def test_a_sound_file_is_read(sound):
    content, path = sound
    assert read_within_limits(path, content) is None


def test_every_truncation_is_refused(sound):
    content, path = sound
    for length in [*range(0, 2000, 7), len(content) - 40]:
        assert read_within_limits(path, content[:length]) is not None


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_damaged_files_are_read_or_refused(sound, data):
    content, path = sound
    damaged = bytearray(content)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, 4000))
        value = data.draw(st.binary(min_size=1, max_size=8))
        damaged[place : place + len(value)] = value
    read_within_limits(path, bytes(damaged))


def header(num_tensors=0, num_fields=0):
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_fields)


def text(value):
    return struct.pack("<Q", len(value)) + value


ARRAY, STRING, UINT8 = 9, 8, 0


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"GGML" + bytes(40), "does not begin with GGUF"),
        (b"GGUF" + struct.pack("<I", 1), "version is 1"),
        (header(num_tensors=2**40), f"limit is {MAX_TENSORS}"),
        (header(num_tensors=1000), "too short"),
        (header(num_fields=2**63), f"limit is {MAX_FIELDS}"),
        (header(num_fields=1) + struct.pack("<Q", 2**62) + bytes(20), "bytes in a string"),
        (
            header(num_fields=1) + text(b"a") + struct.pack("<IIQ", ARRAY, STRING, MAX_ITEMS + 1),
            f"limit is {MAX_ITEMS}",
        ),
        (
            header(num_fields=1) + text(b"a") + struct.pack("<IIQ", ARRAY, UINT8, 2**20),
            "too short",
        ),
        (
            header(num_fields=1) + text(b"a") + struct.pack("<IIQ", ARRAY, ARRAY, 1) + bytes(20),
            "arrays of arrays",
        ),
        (header(num_fields=1) + text(b"a") + struct.pack("<IQ", 77, 0), "of type 77"),
        (
            header(num_tensors=1) + text(b"a") + struct.pack("<IQIQ", 9, 1, 0, 0),
            "9 dimensions",
        ),
        (
            header(num_tensors=1) + text(b"a") + struct.pack("<IQQIQ", 2, 2**60, 2**60, 0, 0),
            "sizes are 1 to",
        ),
        (
            header(num_tensors=1) + text(b"a") + struct.pack("<IQIQ", 1, 2**30, 0, 0),
            "ends at byte",
        ),
        (
            header(num_tensors=1) + text(b"a") + struct.pack("<IQIQ", 1, 4, 0, 2**63) + bytes(64),
            "ends at byte",
        ),
        (
            header(num_tensors=1) + text(b"a") + struct.pack("<IQIQ", 1, 31, 8, 0) + bytes(64),
            "do not fill rows",
        ),
        (
            header(num_tensors=1) + text(b"a") + struct.pack("<IQIQ", 1, 32, 16, 0) + bytes(64),
            "type is IQ2_XXS",
        ),
        (
            header(num_tensors=2)
            + text(b"a")
            + struct.pack("<IQIQ", 1, 32, 0, 0)
            + text(b"b")
            + struct.pack("<IQIQ", 1, 32, 0, 64)
            + bytes(400),
            "begins in another",
        ),
    ],
)
def test_sizes_are_checked_before_memory_is_taken(content, reason, tmp_path):
    path = tmp_path / "model.gguf"
    refusal = read_within_limits(path, content)
    assert refusal is not None
    assert reason in refusal


def test_a_folder_or_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    for path in (tmp_path, tmp_path / "pipe.gguf"):
        with pytest.raises(GgufError, match="not a regular file"):
            read_gguf(path)


def test_an_architecture_that_is_not_ours_is_named(tmp_path):
    path = tmp_path / "model.gguf"
    write_tensors(
        path, "mamba", byte_tokenizer(40), {"token_embd.weight": np.ones((40, 8), np.float32)}
    )
    with pytest.raises(GgufError, match=r"architecture 'mamba' is not supported in GGUF"):
        read_all(path)
