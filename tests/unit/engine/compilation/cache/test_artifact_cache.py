import os
import signal

import pytest

from services.engine.compilation.cache.artifact_cache import ArtifactCache, stored_factors
from services.engine.compilation.cache.cache_key import Factors
from services.engine.compilation.cache.explain import explain
from tests.support.forked_program import LIMIT_S, ForkedProgram
from tests.support.forks import fork_server

HERE = Factors({"torch.version": "2", "source.models/a.py": "x" * 64, "device.type": "cpu"})
THERE = Factors({"torch.version": "1", "source.models/a.py": "x" * 64})

WRITE_MANY = """
import sys
from pathlib import Path
from services.engine.compilation.cache.artifact_cache import ArtifactCache
from services.engine.compilation.cache.cache_key import Factors
cache = ArtifactCache.open(Path(sys.argv[1]), Factors({"torch.version": "1"}))
for number in range(int(sys.argv[2])):
    cache.describe(Factors({"torch.version": "1"}))
    cache.store("one", bytes([number % 251]) * 3_000_000)
    content = cache.load("one")
    assert content == content[:1] * 3_000_000
"""


@pytest.fixture
def cache(tmp_path):
    return ArtifactCache.open(tmp_path, HERE)


def test_what_was_stored_is_loaded(cache):
    assert cache.load("key") is None
    cache.store("key", b"content")
    assert cache.load("key") == b"content"


def test_other_factors_see_nothing_of_it(cache, tmp_path):
    cache.store("key", b"content")
    assert ArtifactCache.open(tmp_path, THERE).load("key") is None


@pytest.mark.parametrize("damage", [b"", b"short", None])
def test_a_damaged_file_is_a_miss(cache, damage):
    cache.store("key", b"content")
    (path,) = cache.folder.glob("*.piece")
    path.write_bytes(path.read_bytes()[:-1] + b"!" if damage is None else damage)
    assert cache.load("key") is None
    cache.store("key", b"content")
    assert cache.load("key") == b"content"


def test_a_folder_that_cannot_be_written_costs_no_more_than_the_cache(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    cache = ArtifactCache.open(tmp_path / "file", HERE)
    cache.store("key", b"content")
    assert cache.load("key") is None


def write_many(folder, number):
    command = ["-c", WRITE_MANY, str(folder), str(number)]
    return ForkedProgram(fork_server("torch"), command, environment=os.environ)


def test_processes_that_write_the_same_piece_at_once_read_whole_ones(tmp_path):
    writers = [write_many(tmp_path, 40) for _ in range(2)]
    assert [writer.wait(LIMIT_S) for writer in writers] == [0, 0]


def test_a_process_killed_while_it_writes_leaves_whole_pieces_or_none(tmp_path):
    writer = write_many(tmp_path, 10**6)
    folder = ArtifactCache.open(tmp_path, Factors({"torch.version": "1"})).folder
    try:
        while not list(folder.glob("*.piece")):
            assert writer.poll() is None
    finally:
        writer.kill()
    assert writer.wait(LIMIT_S) == -signal.SIGKILL
    content = ArtifactCache(folder).load("one")
    assert content is not None
    assert len(content) == 3_000_000


class TestExplain:
    def test_a_fit_is_named(self, cache, tmp_path):
        cache.describe(HERE)
        cache.store("key", b"content")
        answer, _ = explain(tmp_path, HERE, HERE).split("\n", 1)
        assert answer == f"{cache.folder}: 1 compiled piece for this configuration"

    def test_a_miss_names_the_factors_that_differ(self, tmp_path):
        other = ArtifactCache.open(tmp_path, THERE)
        other.describe(THERE)
        answer = explain(tmp_path, HERE, HERE)
        assert "nothing compiled for this configuration" in answer
        assert "0 compiled pieces; 2 factors differ" in answer
        assert "torch.version: here 2, there 1" in answer
        assert "device.type: here cpu, there absent" in answer
        assert "source" not in answer

    def test_traces_are_compared_with_factors_of_their_own(self, tmp_path):
        other = ArtifactCache.open(tmp_path / "traces", THERE)
        other.describe(THERE)
        other.store_program("model", b'{"matches": {"norm_linear": 2}}')
        other.store_program("draft_0", b'{"matches": {"norm_linear": 1, "clean_up": 0}}')
        answer = explain(tmp_path, HERE, THERE)
        assert f"{other.folder}: 2 traced programs for this configuration" in answer
        assert "matches of compiler passes: norm_linear 3, clean_up 0" in answer

    def test_a_damaged_description_is_passed_over(self, tmp_path):
        other = ArtifactCache.open(tmp_path, THERE)
        other.describe(THERE)
        (other.folder / "factors.json").write_text("{")
        assert list(stored_factors(tmp_path)) == []
