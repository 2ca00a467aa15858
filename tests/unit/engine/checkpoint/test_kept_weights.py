"""Where new weights come from, and the copies that are kept of them."""

import hashlib
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.engine.checkpoint import kept_weights
from services.engine.checkpoint.kept_weights import FILE_NAME, WeightsFolder
from services.engine.checkpoint.weights_upload import SentTensor, WeightsUpload
from services.engine.errors import InvalidRequestError, NotPermittedError

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "empty": torch.empty(0, 4),
    "b": torch.ones((), dtype=torch.bfloat16),
    "c": torch.arange(5, dtype=torch.uint8),
}
NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.uint8: "U8"}


def content(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def sent(*, with_digests=True):
    return [
        SentTensor(
            name=name,
            dtype=NAMES[tensor.dtype],
            shape=tuple(tensor.shape),
            sha256=hashlib.sha256(content(tensor)).digest() if with_digests else b"",
        )
        for name, tensor in TENSORS.items()
    ]


@pytest.fixture
def folder(tmp_path):
    folder = WeightsFolder(tmp_path)
    yield folder
    folder.close()
    assert not list(tmp_path.glob(".octavo-*"))


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("with_digests", [True, False])
def test_an_upload_becomes_a_checkpoint_whatever_its_chunks(folder, size, with_digests):
    upload = WeightsUpload(folder, sent(with_digests=with_digests))
    data = b"".join(map(content, TENSORS.values()))
    for start in range(0, len(data), size):
        upload.write(data[start : start + size])
    kept = upload.finish()
    loaded = load_file(kept.folder / FILE_NAME)
    assert loaded.keys() == TENSORS.keys() == kept.names
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())
    assert not kept.has_changed
    kept.discard()
    assert not kept.folder.exists()


def test_wrong_bytes_are_refused_as_soon_as_they_are_seen(folder):
    upload = WeightsUpload(folder, sent())
    with pytest.raises(InvalidRequestError, match="the SHA-256 of tensor a"):
        upload.write(bytes(24))
    upload.discard()
    upload = WeightsUpload(folder, sent(with_digests=False))
    upload.write(bytes(25))
    with pytest.raises(InvalidRequestError, match="after 25 of 31 bytes, in tensor b"):
        upload.finish()
    with pytest.raises(InvalidRequestError, match="more bytes came"):
        upload.write(bytes(7))
    upload.discard()


BAD = {
    "no tensors": [],
    "comes twice": [SentTensor(name="a", dtype="F32", shape=(1,))] * 2,
    "its dtype": [SentTensor(name="a", dtype="F33", shape=(1,))],
    "its shape": [SentTensor(name="a", dtype="F32", shape=(2**40, 2**40))],
    "characters": [SentTensor(name="a\n", dtype="F32", shape=(1,))],
    "32 bytes": [SentTensor(name="a", dtype="F32", shape=(1,), sha256=b"1")],
    "has room for": [SentTensor(name="a", dtype="F32", shape=(2**42,))],
}


@pytest.mark.parametrize("reason", BAD)
def test_bad_descriptions_are_refused_before_any_byte(folder, reason):
    match = "has 1 to" if reason == "no tensors" else reason
    with pytest.raises(InvalidRequestError, match=match):
        WeightsUpload(folder, BAD[reason])


def test_a_wrong_digest_of_an_empty_tensor_leaves_no_copy(folder, tmp_path):
    tensor = SentTensor(name="a", dtype="F32", shape=(0,), sha256=bytes(32))
    with pytest.raises(InvalidRequestError, match="the SHA-256 of tensor a"):
        WeightsUpload(folder, [tensor])
    assert not list(tmp_path.glob("*/copy-*"))


def test_folders_are_found_under_the_root_alone(folder, tmp_path):
    inner = tmp_path / "hub" / "step"
    inner.mkdir(parents=True)
    save_file(TENSORS, tmp_path / "blob")
    (inner / FILE_NAME).symlink_to(tmp_path / "blob")
    kept = folder.find("hub/step")
    assert (kept.folder, kept.names) == (inner, None)
    digest = hashlib.sha256((tmp_path / "blob").read_bytes()).digest()
    assert folder.find(str(inner), digest) == kept
    with pytest.raises(InvalidRequestError, match="the SHA-256 of the files"):
        folder.find("hub/step", bytes(32))
    for path in ("..", "/", "hub/../..", str(tmp_path.parent)):
        with pytest.raises(NotPermittedError, match="from --weights-folder alone"):
            folder.find(path)
    (tmp_path / "loop").symlink_to("loop")
    for path in ("", "hub/none", "a\0b", "loop", "loop/x", "a" * 300):
        with pytest.raises(InvalidRequestError):
            folder.find(path)
    (inner / "other").symlink_to("/etc/passwd")
    with pytest.raises(NotPermittedError):
        folder.find("hub/step")
    with pytest.raises(NotPermittedError, match="lacks --weights-folder"):
        WeightsFolder(None).find("hub")
    assert kept.has_changed
    shutil.rmtree(inner)
    assert kept.has_changed


def test_shared_memory_is_copied_if_it_is_ours(folder, tmp_path, monkeypatch):
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setattr(kept_weights, "SHARED_MEMORY", memory)
    save_file(TENSORS, memory / "new")
    (memory / "new").chmod(0o600)
    data = (memory / "new").read_bytes()
    kept = folder.copy_shared_memory("new", hashlib.sha256(data).digest())
    assert (kept.folder / FILE_NAME).read_bytes() == data
    with pytest.raises(InvalidRequestError, match="the SHA-256 of shared memory new"):
        folder.copy_shared_memory("new", bytes(32))
    (memory / "link").symlink_to(memory / "new")
    for name in ("link", "none", "../new", "", "a/b"):
        with pytest.raises(InvalidRequestError):
            folder.copy_shared_memory(name)
    (memory / "new").chmod(0o666)
    with pytest.raises(NotPermittedError, match="other users can write"):
        folder.copy_shared_memory("new")
    assert [each.name for each in kept.folder.parent.glob("copy-*")] == [kept.folder.name]


def test_copies_of_a_process_that_was_killed_go_with_the_next_copy(tmp_path):
    living, killed = WeightsFolder(tmp_path), WeightsFolder(tmp_path)
    kept, left = living.make_copy(1), killed.make_copy(1)
    os.close(killed._lock)
    killed._lock = killed._private = None
    new = WeightsFolder(tmp_path)
    new.make_copy(1)
    assert kept.folder.exists()
    assert not left.folder.exists()
    for each in (living, new):
        each.close()
    assert not list(Path(tmp_path).iterdir())
