"""Where a GGUF model may be, and what its folder has."""

import pytest

from services.engine.checkpoint.gguf_model import gguf_files
from services.hub.names import HubError


@pytest.fixture
def folder(tmp_path):
    for name in ("a.gguf", "b.gguf", "mmproj.gguf", "inner/c.gguf"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def test_a_file_is_taken_as_it_is(folder):
    assert gguf_files(folder / "a.gguf", "") == (folder / "a.gguf",)


def test_a_file_of_a_folder_is_chosen_by_its_name(folder):
    assert gguf_files(folder, "b.gguf") == (folder / "b.gguf",)
    assert gguf_files(folder, "inner/c.gguf") == (folder / "inner" / "c.gguf",)
    with pytest.raises(HubError, match="choose by --gguf-file"):
        gguf_files(folder, "")


def test_a_name_cannot_lead_out_of_the_folder(folder):
    with pytest.raises(HubError, match="leads out"):
        gguf_files(folder / "inner", "../a.gguf")


def test_safetensors_win_unless_a_file_is_named(folder):
    (folder / "model.safetensors").touch()
    assert gguf_files(folder, "") == ()
    assert gguf_files(folder, "a.gguf") == (folder / "a.gguf",)


def test_other_folders_are_left_alone(tmp_path):
    assert gguf_files(tmp_path, "") == ()
    assert gguf_files(tmp_path / "absent", "") == ()
