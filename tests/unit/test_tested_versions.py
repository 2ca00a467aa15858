"""Pinned versions are the tested ones, and the other way round."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[2]


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def extra(name: str) -> dict[str, Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = [Requirement(text) for text in project["optional-dependencies"][name]]
    return {requirement.name: requirement for requirement in found}


GPU = pins("constraints-gpu.txt")
CPU = pins("constraints-cpu.txt")


@pytest.mark.parametrize("pinned", [GPU, CPU])
def test_the_ranges_hold_what_is_pinned(pinned):
    ranges = extra("engine") | extra("gpu")
    for package in ("torch", "triton"):
        assert ranges[package].specifier.contains(pinned[package])


def test_an_installation_for_a_cpu_has_no_triton():
    assert "triton" in extra("gpu")
    assert "triton" not in extra("engine") | extra("cpu") | pins("constraints.txt")


def test_kernels_are_built_with_a_pinned_triton_where_there_is_no_gpu():
    assert extra("dev")["triton"].specifier == extra("gpu")["triton"].specifier
    assert "triton" in CPU


@pytest.mark.parametrize(
    "page",
    [
        "benchmarks.md",
        "kernels.md",
        "kernels/attention.md",
        "kernels/experts.md",
        "kernels/products.md",
    ],
)
def test_figures_were_measured_on_a_gpu_with_the_pinned_versions(page):
    text = (ROOT / "docs" / page).read_text()
    pairs = re.findall(r"torch (\d[\d.]*)\+?\w*,\s+Triton (\d[\d.]*\d)", text)
    assert set(pairs) == {(GPU["torch"], GPU["triton"])}
    assert set(re.findall(r"Triton (\d+\.\d+\.\d+)", text)) == {GPU["triton"]}


def test_the_readme_names_the_torch_that_a_machine_without_a_gpu_gets():
    assert f"torch {CPU['torch']} of PyPI" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("pinned", [GPU, CPU])
def test_the_pinned_versions_are_in_the_table_of_tested_ones(pinned):
    rows = (ROOT / "docs" / "installing.md").read_text().splitlines()
    numpy = pins("constraints.txt")["numpy"]
    pattern = rf"\| {pinned['torch']}[^|]* \| {pinned['triton']} \| {numpy} \|"
    assert any(re.match(pattern, row) for row in rows)


def test_the_image_for_a_gpu_is_built_with_its_pins():
    compose = yaml.safe_load((ROOT / "deploy" / "docker-compose.gpu.yml").read_text())
    assert compose["services"]["engine"]["build"]["args"]["DEVICE"] == "gpu"
    installs = (
        (ROOT / "deploy" / "engine.Dockerfile").read_text().count('"constraints-${DEVICE}.txt"')
    )
    assert installs == 2


def test_every_place_names_the_same_versions_of_python():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    classified = [
        text.rpartition(" ")[2] for text in project["classifiers"] if ":: Python :: 3." in text
    ]
    allowed = SpecifierSet(project["requires-python"])
    assert classified == [f"3.{minor}" for minor in range(30) if f"3.{minor}" in allowed]
    setup = (ROOT / "scripts" / "setup").read_text()
    [tried] = re.findall(r"for candidate in \$\{PYTHON:-\} python3 (.*); do", setup)
    assert sorted(tried.split()) == [f"python{version}" for version in classified]
    assert f"Python {classified[0]} to {classified[-1]} with" in setup
    first, last = (int(version.split(".")[1]) for version in (classified[0], classified[-1]))
    assert f"(3, {first}) <= sys.version_info < (3, {last + 1})" in setup
