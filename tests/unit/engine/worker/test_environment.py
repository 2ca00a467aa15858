"""The folders from which workers load code."""

import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from services.engine.config.engine_config import EngineConfig
from services.engine.worker import environment as environment_module
from services.engine.worker.environment import CODE_FOLDERS, worker_environment
from services.engine.worker.executor import WorkerExecutor
from services.engine.worker.rank_process import WorkerDiedError
from services.processes.private_folder import ExposedFolderError, private_path

MPS = "CUDA_MPS_PIPE_DIRECTORY"


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    for name in (*CODE_FOLDERS, MPS):
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


@pytest.fixture
def mps_folder(tmp_path, monkeypatch):
    """CUDA's default folder of the MPS server, which does not exist."""
    monkeypatch.setattr(environment_module, "MPS_FOLDER", tmp_path / "nvidia-mps")
    return tmp_path / "nvidia-mps"


def mps_of(config, temporary):
    return worker_environment(config, "lo", temporary)[MPS]


def test_cuda_uses_an_mps_server_of_root_or_of_this_user(config, tmp_path, mps_folder):
    mps_folder.mkdir(mode=0o777)
    assert mps_of(config, tmp_path) == str(mps_folder)


@pytest.mark.parametrize("kind", ["absent", "link", "other user's"])
def test_cuda_finds_no_mps_server_that_another_user_could_have_started(
    config, tmp_path, monkeypatch, mps_folder, kind
):
    if kind == "link":
        (tmp_path / "served").mkdir()
        mps_folder.symlink_to(tmp_path / "served")
    if kind == "other user's":
        mps_folder.mkdir()
        (tmp_path / "new").mkdir(mode=0o700)
        monkeypatch.setattr(
            Path, "lstat", lambda _: os.stat_result([0o40777, 1, 1, 1, 65534, *[0] * 5])
        )
    with capture_logs() as logs:
        assert mps_of(config, tmp_path / "new") == str(tmp_path / "new" / "mps")
    assert not (tmp_path / "new" / "mps").exists()
    assert [line["event"] for line in logs] == ["mps_not_used"] * (kind != "absent")


def test_an_mps_server_that_the_environment_names_is_used(config, tmp_path, monkeypatch):
    monkeypatch.setenv(MPS, "/somewhere")
    assert mps_of(config, tmp_path) == "/somewhere"
