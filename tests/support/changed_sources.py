"""Which tests a change concerns, by the modules that they name, directly and through others.

A name counts in imports, and in texts: tests also run modules as programs, which they have as text.
"""

import re
import subprocess
from functools import cached_property
from pathlib import Path

import pytest

_PACKAGES = "models|protos|scripts|services|tests"
_NAMES = re.compile(rf"\b(?:{_PACKAGES})(?:\.\w+)+")
_IMPORTS = re.compile(rf"\bfrom ((?:{_PACKAGES})[\w.]*) import (\([^)]*\)|[^\n]*)")
_NOT_READ = {".md", ".svg"}
"""Kinds of files that no test of `tests/matrices.toml` reads."""


class ChangedSources:
    """The files that differ from those at a commit, and what depends on them."""

    def __init__(self, root: Path, changed: set[Path]) -> None:
        """Takes absolute paths below the root; both kinds of a moved file's path count."""
        self._root = root
        self._changed = changed
        self._named: dict[Path, set[Path]] = {}

    @classmethod
    def since(cls, root: Path, revision: str) -> "ChangedSources":
        """Compares the working tree with the last commit that it shares with a revision.

        On that revision itself it compares with the commit before.

        Raises:
            pytest.UsageError: git does not know the revision, or has no history to compare with.
        """

        def git(*arguments: str) -> str:
            command = ["git", "-C", str(root), *arguments]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise pytest.UsageError(f"changes since {revision}: {done.stderr.strip()}")
            return done.stdout

        base = git("merge-base", "HEAD", revision).strip()
        if base == git("rev-parse", "HEAD").strip():
            base = "HEAD^"
        names = git("diff", "--name-only", "--no-renames", "-z", base)
        names += git("ls-files", "--others", "--exclude-standard", "-z")
        return cls(root, {root / name for name in names.split("\0") if name})

    def concern(self, test: Path) -> bool:
        """Returns whether a test file names something changed, itself or through others."""
        return self._concern_all or not self._changed.isdisjoint(self._reached(test))

    @cached_property
    def _concern_all(self) -> bool:
        # Checkpoints, versions of packages and the like, which no source names.
        return any(path.suffix not in {".py", *_NOT_READ} for path in self._changed)

    def _reached(self, test: Path) -> set[Path]:
        # Beside what it names, pytest loads these for a test.
        folders = [each for each in test.parents if each.is_relative_to(self._root)]
        left = [test, *(folder / "conftest.py" for folder in folders)]
        reached: set[Path] = set()
        while left:
            path = left.pop()
            if path not in reached:
                reached.add(path)
                left.extend(self._names_of(path))
        return reached

    def _names_of(self, path: Path) -> set[Path]:
        if path not in self._named:
            text = path.read_text() if path.exists() else ""
            names = {match[0] for match in _NAMES.finditer(text)}
            for module, imported in _IMPORTS.findall(text):
                names |= {f"{module}.{name}" for name in re.findall(r"\w+", imported)}
            self._named[path] = {file for name in names for file in self._files_of(name)}
        return self._named[path]

    def _files_of(self, name: str) -> list[Path]:
        """Returns the module's files, or those of the module that has the name as an attribute."""
        parts = name.split(".")
        while parts:
            place = self._root.joinpath(*parts)
            module = place.with_name(f"{parts[-1]}.py")
            files = [place / "__init__.py", place / "__main__.py", module]
            # A module that was deleted is no file any more, and a change.
            if found := [file for file in files if file.exists() or file in self._changed]:
                return found
            parts.pop()
        return []
