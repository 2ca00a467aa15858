"""The table of extras is that of pyproject.toml, and what is missing is named; the version."""

import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from services.settings.installation import MODULES, MissingExtraError, own_version, require_extras

PROJECT = tomllib.loads((Path(__file__).resolve().parents[3] / "pyproject.toml").read_text())


@pytest.mark.parametrize("extra", MODULES)
def test_an_extra_has_a_module_of_each_of_its_packages(extra):
    wanted = PROJECT["project"]["optional-dependencies"][extra]
    packages = {Requirement(text).name.lower().replace("-", "_") for text in wanted}
    if extra == "tracing":  # a package of namespaces
        assert len(MODULES[extra]) == len(packages)
        return
    owners = metadata.packages_distributions()
    found = {
        owner.lower().replace("-", "_") for module in MODULES[extra] for owner in owners[module]
    }
    assert found == packages


def test_what_is_missing_is_named_with_its_extra(monkeypatch):
    require_extras("engine")
    for module in ("torch", "safetensors"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        MissingExtraError, match=r"safetensors, torch are not installed; .*`engine`"
    ):
        require_extras("engine")


def test_packages_of_several_extras_are_named_at_once(monkeypatch):
    for module in ("jinja2", "torch"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=r"torch, jinja2 are not.*extras `engine,frontend`"):
        require_extras("engine", "tracing", "frontend")


def test_an_installed_version_is_that_of_the_distribution():
    assert own_version() == metadata.version("octavo")


def test_a_checkout_that_is_not_installed_has_no_number(monkeypatch):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr("services.settings.installation.version", absent)
    assert own_version() == "source"
