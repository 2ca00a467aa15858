"""scripts/test --changed: which tests a change concerns."""

import subprocess

import pytest

from tests.support.changed_sources import ChangedSources

FILES = {
    "models/layers.py": "from models import products\n",
    "models/products.py": "from models.kernels import (\n    linear,\n    norm,\n)\n",
    "models/kernels/__init__.py": "",
    "models/kernels/linear.py": "",
    "models/kernels/norm.py": "",
    "models/other.py": "",
    "services/engine/__init__.py": "",
    "services/engine/__main__.py": "import models.other\n",
    "tests/conftest.py": "import models.other\n",
    "tests/test_layers.py": "import models.layers\n",
    "tests/unit/test_norm.py": 'PROGRAM = """\nfrom models.kernels.norm import normalize\n"""\n',
    "tests/unit/test_engine.py": 'run("services.engine", "--port")\n',
}


@pytest.fixture
def root(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def concerned(root, *changed):
    changes = ChangedSources(root, {root / name for name in changed})
    tests = [name for name in FILES if "/test_" in name]
    return {name.rpartition("/")[2] for name in tests if changes.concern(root / name)}


ALL = {"test_layers.py", "test_norm.py", "test_engine.py"}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ("tests/unit/test_norm.py", {"test_norm.py"}),
        ("models/kernels/linear.py", {"test_layers.py"}),
        ("models/kernels/norm.py", {"test_layers.py", "test_norm.py"}),
        ("services/engine/__main__.py", {"test_engine.py"}),
        ("models/other.py", ALL),
        ("tests/conftest.py", ALL),
        ("models/new.py", set()),
        ("docs/models.md", set()),
        ("pyproject.toml", ALL),
        ("models/checkpoints/tiny/config.json", ALL),
    ],
)
def test_a_change_concerns_tests_that_name_the_file_directly_or_through_others(
    root, changed, expected
):
    assert concerned(root, changed) == expected


def test_a_module_that_is_gone_concerns_those_that_still_name_it(root):
    (root / "models/kernels/linear.py").unlink()
    assert concerned(root, "models/kernels/linear.py") == {"test_layers.py"}


def test_changes_are_those_since_the_commit_that_both_share(root):
    def git(*arguments):
        own = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")
        subprocess.run(["git", "-C", str(root), *own, *arguments], check=True, capture_output=True)

    def commit(name, text):
        (root / name).write_text(text)
        git("add", ".")
        git("commit", "-m", name)

    def tests():
        changes = ChangedSources.since(root, "main")
        return {name for name in FILES if "/test_" in name and changes.concern(root / name)}

    git("init")
    git("add", ".")
    git("commit", "-m", "all")
    git("branch", "kept")
    commit("models/kernels/linear.py", "changed = 1\n")
    assert tests() == {"tests/test_layers.py"}  # of the last commit, as this is main
    git("checkout", "kept")
    commit("models/layers.py", "changed = 1\n")
    assert tests() == {"tests/test_layers.py"}
    (root / "models/kernels/norm.py").write_text("changed = 1\n")
    assert "tests/unit/test_norm.py" in tests()
    git("checkout", "models/kernels/norm.py")
    (root / "tests/unit/test_engine.py").unlink()
    git("mv", "tests/unit/test_norm.py", "tests/unit/test_moved.py")
    assert "tests/unit/test_norm.py" in tests()
    with pytest.raises(pytest.UsageError, match="nowhere"):
        ChangedSources.since(root, "nowhere")
