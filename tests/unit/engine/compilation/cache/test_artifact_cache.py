import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.engine.compilation.cache.artifact_cache import ArtifactCache, stored_factors
from services.engine.compilation.cache.cache_key import Factors
from services.engine.compilation.cache.explain import explain

ROOT = Path(__file__).resolve().parents[5]
HERE = Factors({"torch.version": "2", "source.models/a.py": "x" * 64, "device.type": "cpu"})
THERE = Factors({"torch.version": "1", "source.models/a.py": "x" * 64})

WRITE_MANY = """
import sys
from pathlib import Path
from services.engine.compilation.cache.artifact_cache import ArtifactCache
from services.engine.compilation.cache.cache_key import Factors
cache = ArtifactCache.open(Path(sys.argv[1]), Factors({"torch.version": "1"}))
print("writing", flush=True)
for number in range(int(sys.argv[2])):
    cache.describe(Factors({"torch.version": "1"}))
    cache.store("one", bytes([number % 251]) * 3_000_000)
    content = cache.load("one")
    assert content is not None and len(content) == 3_000_000 and len(set(content)) == 1
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
    return subprocess.Popen(
        [sys.executable, "-c", WRITE_MANY, str(folder), str(number)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_processes_that_write_the_same_piece_at_once_read_whole_ones(tmp_path):
    writers = [write_many(tmp_path, 8) for _ in range(2)]
    with ThreadPoolExecutor() as pool:
        results = list(pool.map(lambda writer: writer.communicate(timeout=90), writers))
    assert [writer.returncode for writer in writers] == [0, 0], results


def test_a_process_killed_while_it_writes_leaves_whole_pieces_or_none(tmp_path):
    with write_many(tmp_path, 10**6) as writer:
        writer.stdout.readline()
        folder = ArtifactCache.open(tmp_path, Factors({"torch.version": "1"})).folder
        while not list(folder.glob("*.piece")):
            assert writer.poll() is None
        writer.send_signal(signal.SIGKILL)
        writer.wait(30)
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
