"""Files of blocks: whole, of this model and of this block, or not a block at all."""

import errno
import os

import pytest

from services.engine.kv_cache.host_tier import ENTRY_BYTES
from services.engine.worker.tiers import disk_store
from services.engine.worker.tiers.disk_store import DiskStore, LostBlockError
from services.processes.private_folder import ExposedFolderError

IDENTITY, OTHER = bytes(32), bytes([1]) * 32
SIZE = 500
FILE_BYTES = SIZE + disk_store._HEADER.size


def entry(number: int) -> bytes:
    return bytes([number]) * ENTRY_BYTES


def content(number: int) -> bytes:
    return bytes([number, 255 - number]) * (SIZE // 2)


def opened(folder, *, identity=IDENTITY, num_files=100) -> DiskStore:
    return DiskStore(folder, identity=identity, max_bytes=num_files * FILE_BYTES)


@pytest.fixture
def folder(tmp_path):
    return tmp_path.resolve() / "blocks"


def read(store: DiskStore, number: int) -> bytes:
    memory = bytearray(SIZE)
    store.read(entry(number), memoryview(memory))
    return bytes(memory)


def file_of(store: DiskStore, number: int):
    [path] = store.folder.rglob(f"{entry(number).hex()}*")
    return path


def test_a_block_is_read_as_it_was_written_by_the_next_process_too(folder):
    store = opened(folder)
    for number in range(5):
        assert store.write(entry(number), content(number)) == []
    again = opened(folder)
    assert sorted(again.entries) == sorted(map(entry, range(5)))
    assert [read(again, number) for number in range(5)] == list(map(content, range(5)))


def test_folder_and_files_are_private(folder):
    store = opened(folder)
    store.write(entry(1), content(1))
    path = file_of(store, 1)
    assert path.stat().st_mode & 0o777 == 0o600
    for each in (path.parent, store.folder, folder):
        assert each.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_may_write_to_is_refused(folder):
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    with pytest.raises(ExposedFolderError):
        opened(folder)


def test_another_model_finds_none_of_them(folder):
    opened(folder).write(entry(1), content(1))
    other = opened(folder, identity=OTHER)
    assert not other.entries
    with pytest.raises(LostBlockError):
        read(other, 1)


DAMAGES = {
    "a bit of the block": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "a bit of the digest": lambda data: data[:120] + bytes([data[120] ^ 1]) + data[121:],
    "cut short": lambda data: data[:-7],
    "longer": lambda data: data + b"more",
    "empty": lambda data: b"",
    "zeros, as a loss of power leaves them": lambda data: bytes(len(data)),
    "another version": lambda data: b"octavo-kv-block9" + data[16:],
    "a foreign file": lambda data: b"#!/bin/sh\nexit 1\n",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_removed_and_no_block(folder, damage):
    store = opened(folder)
    store.write(entry(1), content(1))
    path = file_of(store, 1)
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    with pytest.raises(LostBlockError) as caught:
        read(store, 1)
    assert caught.value.is_damaged
    assert not path.exists()
    assert entry(1) not in store.entries
    store.write(entry(1), content(1))
    assert read(store, 1) == content(1)


def test_another_block_under_its_name_is_not_taken_for_it(folder):
    store = opened(folder)
    store.write(entry(1), content(1))
    store.write(entry(2), content(2))
    file_of(store, 2).rename(file_of(store, 1))
    with pytest.raises(LostBlockError):
        read(store, 1)


def test_a_block_of_another_model_under_its_name_is_not_taken_for_it(folder):
    ours, others = opened(folder), opened(folder, identity=OTHER)
    ours.write(entry(1), content(1))
    others.write(entry(1), content(9))
    file_of(others, 1).rename(file_of(ours, 1))
    with pytest.raises(LostBlockError):
        read(ours, 1)


def test_a_link_is_not_followed(folder, tmp_path):
    store = opened(folder)
    store.write(entry(1), content(1))
    path = file_of(store, 1)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LostBlockError):
        read(store, 1)


def test_a_missing_file_is_no_damage(folder):
    store = opened(folder)
    store.write(entry(1), content(1))
    file_of(store, 1).unlink()
    with pytest.raises(LostBlockError) as caught:
        read(store, 1)
    assert not caught.value.is_damaged


def test_the_files_used_least_lately_make_room(folder):
    store = opened(folder, num_files=3)
    for number in range(3):
        store.write(entry(number), content(number))
    read(store, 0)
    assert store.write(entry(3), content(3)) == [entry(1)]
    assert sorted(store.entries) == [entry(0), entry(2), entry(3)]
    assert len(list(store.folder.rglob("*.block"))) == 3


def test_a_smaller_limit_holds_after_a_restart(folder):
    store = opened(folder)
    for number in range(6):
        store.write(entry(number), content(number))
        os.utime(file_of(store, number), ns=(0, number))
    smaller = opened(folder, num_files=3)
    assert smaller.write(entry(7), content(7)) == [entry(number) for number in range(4)]
    assert sorted(smaller.entries) == [entry(4), entry(5), entry(7)]


def test_a_block_beyond_the_limit_is_not_written(folder):
    store = opened(folder, num_files=0)
    assert store.write(entry(1), content(1)) == []
    assert not store.entries


def test_halves_that_a_killed_process_left_are_removed(folder):
    store = opened(folder)
    store.write(entry(1), content(1))
    shelf = file_of(store, 1).parent
    (shelf / ".123-abc.tmp").write_bytes(b"half")
    (shelf / "notes.txt").write_text("of the operator")
    again = opened(folder)
    assert list(again.entries) == [entry(1)]
    assert sorted(path.name for path in shelf.iterdir()) == sorted(
        [f"{entry(1).hex()}.block", "notes.txt"]
    )


def test_a_full_disk_leaves_no_file(folder, monkeypatch):
    store = opened(folder)
    store.write(entry(1), content(1))

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        store.write(entry(2), content(2))
    assert list(store.entries) == [entry(1)]
    assert list(opened(folder).entries) == [entry(1)]
    assert not list(store.folder.rglob("*.tmp"))
