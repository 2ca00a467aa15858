"""Folders of adapters that operators name: under --lora-folder alone, whatever is in it."""

import pytest

from services.engine.checkpoint.adapter_folder import folder_under
from services.engine.errors import InvalidRequestError, NotPermittedError


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "adapters"
    (root / "own" / "inner").mkdir(parents=True)
    (root / "linked").symlink_to("own")
    return root


def test_folders_and_links_inside_are_found(root):
    for path in ("own", "linked", str(root / "own"), "own/../own", "missing"):
        found = folder_under(root, path)
        assert found == (root / ("missing" if path == "missing" else "own"))


@pytest.mark.parametrize("path", ["..", "/", "own/../..", "/etc", "out", "out/hosts", "has-link"])
def test_paths_that_lead_out_are_refused_alike(root, path):
    (root / "out").symlink_to("/etc")
    (root / "has-link").mkdir()
    (root / "has-link" / "adapter_config.json").symlink_to("/etc/passwd")
    with pytest.raises(NotPermittedError, match=r"^adapters are loaded from --lora-folder alone$"):
        folder_under(root, path)


@pytest.mark.parametrize(
    "path", ["", "a\0b", "a\nb", "a" * 300, "a" * 5000, "loop", "loop/x", "has-loop"]
)
def test_paths_that_cannot_be_followed_are_refused(root, path):
    (root / "loop").symlink_to("loop")
    (root / "has-loop").mkdir()
    (root / "has-loop" / "adapter_config.json").symlink_to("adapter_config.json")
    with pytest.raises(InvalidRequestError, match=r"^the (path|folder) "):
        folder_under(root, path)


def test_without_a_folder_nothing_is_loaded():
    with pytest.raises(NotPermittedError, match="lacks --lora-folder"):
        folder_under(None, "own")
