"""The folders from which workers load code."""

import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from services.engine.config.engine_config import EngineConfig
from services.engine.worker.environment import CODE_FOLDERS, worker_environment
from services.engine.worker.executor import WorkerExecutor
from services.engine.worker.rank_process import WorkerDiedError
from services.processes.private_folder import ExposedFolderError, private_path


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    for name in CODE_FOLDERS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def config(tmp_path):
    return EngineConfig.from_flags(model=tmp_path, compile_cache_dir=tmp_path / "code")


def folders_of(config, temporary):
    environment = worker_environment(config, "lo", temporary)
    return {name: Path(environment[name]) for name in CODE_FOLDERS}


def test_all_libraries_keep_code_in_this_users_folder_of_the_compile_cache(config, tmp_path):
    folders = folders_of(config, tmp_path)
    assert {path.parent for path in folders.values()} == {private_path(tmp_path / "code")}
    assert len({*folders.values()}) == len(CODE_FOLDERS)
    assert {path.stat().st_mode & 0o7777 for path in folders.values()} == {0o700}


def test_temporary_files_and_sockets_of_ranks_have_a_folder_of_the_start(config, tmp_path):
    assert worker_environment(config, "lo", tmp_path / "new")["TMPDIR"] == str(tmp_path / "new")


def test_a_folder_that_the_environment_names_gets_a_private_one(config, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "given"))
    folder = folders_of(config, tmp_path)["TRITON_CACHE_DIR"]
    assert folder == private_path(tmp_path / "given")
    assert folder.stat().st_mode & 0o7777 == 0o700


@pytest.mark.parametrize("name", ["--compile-cache-dir", "TORCHINDUCTOR_CACHE_DIR"])
async def test_no_worker_starts_on_code_that_others_can_change(config, tmp_path, monkeypatch, name):
    exposed = tmp_path / ("code" if name.startswith("-") else "given")
    exposed.mkdir()
    exposed.chmod(0o777)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "given"))
    with pytest.raises(ExposedFolderError, match=f"^{name}: .*{exposed}"):
        worker_environment(config, "lo", tmp_path)
    executor = WorkerExecutor(config)
    with pytest.raises(WorkerDiedError, match=f"^{name}: .*{exposed}"):
        await executor.start()
    await executor.stop()


def test_code_is_not_kept_where_no_folder_can_be_made(config, tmp_path):
    (tmp_path / "code").write_text("in the way")
    with capture_logs() as logs:
        folders = folders_of(config, tmp_path / "new")
    assert {path.parent for path in folders.values()} == {tmp_path / "new"}
    assert [line["event"] for line in logs] == ["compiled_code_not_kept"] * len(CODE_FOLDERS)


def test_the_default_folder_is_in_the_users_home():
    assert EngineConfig.from_flags(model="m").compilation.code_dir == Path(
        os.path.realpath(Path("~/.cache/octavo/compile").expanduser()),
        f"private-{os.geteuid()}",
    )
