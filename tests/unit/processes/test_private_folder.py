import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from services.processes.private_folder import (
    ExposedFolderError,
    make_private,
    private_path,
    read_private,
    temporary_folder,
    write_private,
)

ROOT = Path(__file__).resolve().parents[3]
OTHER = 65534
GROUP = 10001
"""A group of the user in a pod, as Kubernetes gives its volumes to it."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")


@pytest.fixture
def own(tmp_path):
    return private_path(tmp_path)


def mode_of(path):
    return path.stat().st_mode & 0o7777


def test_a_folder_is_made_for_this_user_alone_and_keeps_files(own):
    write_private(own / "inside" / "piece", b"code")
    assert own.name == f"private-{os.geteuid()}"
    assert {mode_of(path) for path in (own, own / "inside")} == {0o700}
    assert mode_of(own / "inside" / "piece") == 0o600
    assert read_private(own / "inside" / "piece") == b"code"
    assert [path.name for path in (own / "inside").iterdir()] == ["piece"]


def test_links_above_a_folder_are_resolved_before_it_is_checked(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert private_path(tmp_path / "link").parent == (tmp_path / "real").resolve()


def test_a_link_in_place_of_a_folder_is_refused_with_its_name(own, tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    own.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ExposedFolderError, match=f"{own} is a link"):
        make_private(own)


def test_a_link_in_place_of_a_file_is_not_followed(own, tmp_path):
    (tmp_path / "code").write_bytes(b"of another")
    make_private(own)
    (own / "piece").symlink_to(tmp_path / "code")
    with pytest.raises(OSError, match="symbolic links"):
        read_private(own / "piece")


def test_a_folder_that_others_may_read_is_closed_to_them(own):
    own.mkdir(mode=0o755)
    make_private(own)
    assert mode_of(own) == 0o700


def test_what_others_could_have_written_is_refused_with_its_name(own):
    write_private(own / "piece", b"code")
    (own / "piece").chmod(0o666)
    with pytest.raises(ExposedFolderError, match=f"may have written to {own / 'piece'}"):
        read_private(own / "piece")
    own.chmod(0o777)
    with pytest.raises(ExposedFolderError, match=f"may have written to {own} .mode 0777"):
        make_private(own)


def test_a_parent_that_others_may_write_to_is_refused_unless_it_is_sticky(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(ExposedFolderError, match=f"change what is in {shared}: .* .mode 0777"):
        make_private(private_path(shared))
    shared.chmod(0o1777)
    make_private(private_path(shared))


def test_a_parent_that_becomes_exposed_after_the_start_is_seen_at_the_next_use(own, tmp_path):
    write_private(own / "piece", b"code")
    tmp_path.chmod(0o777)
    with pytest.raises(ExposedFolderError, match=str(tmp_path)):
        read_private(own / "piece")
    with pytest.raises(ExposedFolderError, match=str(tmp_path)):
        write_private(own / "piece", b"other code")


@needs_root
@pytest.mark.parametrize("victim", ["the parent", "the folder", "a file"])
def test_another_users_file_or_folder_is_refused_with_its_name(own, tmp_path, victim):
    write_private(own / "piece", b"code")
    path = {"the parent": tmp_path, "the folder": own, "a file": own / "piece"}[victim]
    os.chown(path, OTHER, OTHER)
    with pytest.raises(ExposedFolderError, match=f"{path}.* belongs to .*uid {OTHER}"):
        read_private(own / "piece")


@needs_root
def test_a_folder_that_another_user_made_first_in_a_sticky_one_is_refused(tmp_path):
    tmp_path.chmod(0o1777)
    squatted = private_path(tmp_path)
    squatted.mkdir(mode=0o777)
    os.chown(squatted, OTHER, OTHER)
    with pytest.raises(ExposedFolderError, match=f"{squatted} belongs to another user"):
        make_private(squatted)


@needs_root
def test_a_group_of_other_users_may_not_write_and_ones_own_group_may(tmp_path):
    tmp_path.chmod(0o775)  # as with a umask of 002
    make_private(private_path(tmp_path))
    os.chown(tmp_path, 0, GROUP)
    with pytest.raises(ExposedFolderError, match=r"others may write to it \(mode 0775\)"):
        make_private(private_path(tmp_path))


def test_temporary_folders_are_private_and_go_with_their_object():
    made = temporary_folder()
    folder = Path(made.name)
    assert (mode_of(folder), folder.is_dir()) == (0o700, True)
    made.cleanup()
    made.cleanup()
    assert not folder.exists()


def test_a_temporary_folder_is_refused_where_others_can_replace_it(tmp_path, monkeypatch):
    tmp_path.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ExposedFolderError, match=str(tmp_path)):
        temporary_folder()
    assert list(tmp_path.iterdir()) == []


USE_A_VOLUME = """
set -e
mount -t tmpfs -o mode=$1 none "$2"
chown "$3" "$2"
exec setpriv --reuid 10001 --regid 10001 --groups 10001 "$4" -c "
from pathlib import Path
from services.processes import private_folder
from services.processes.private_folder import private_path, read_private, write_private
private_folder._CONTAINER_MARKS = ()  # the machine of these tests may be a container
piece = private_path(Path('$2')) / 'piece'
write_private(piece, b'code')
print(read_private(piece).decode(), oct(piece.parent.stat().st_mode & 0o777))
"
"""


@needs_root
@pytest.mark.parametrize("variables", [{}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}])
@pytest.mark.parametrize(
    ("mode", "owner"),
    [("2775", "0:10001"), ("0777", "0:0"), ("2777", "0:10001"), ("0755", "10001:10001")],
)
def test_volumes_are_used_as_a_container_gets_them_and_checked_elsewhere(mode, owner, variables):
    if shutil.which("setpriv") is None or subprocess.run(["unshare", "-m", "true"]).returncode:
        pytest.skip("needs setpriv, and the right to mount")
    with tempfile.TemporaryDirectory(dir="/mnt") as volume:
        Path(volume).chmod(0o755)
        command = ["unshare", "-m", "sh", "-c", USE_A_VOLUME, "sh", mode, volume, owner]
        done = subprocess.run(
            [*command, sys.executable],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **variables},
            capture_output=True,
            text=True,
        )
    if variables or mode == "0755":
        assert (done.stdout, done.stderr) == ("code 0o700\n", "")
    else:
        assert f"other users can change what is in {volume}" in done.stderr
