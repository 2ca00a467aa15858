"""Flags of models that share a card, whether the host holds them, and their first turns."""

import pytest

from services.client.serve_flags import Division, ServeFlagError
from services.client.serve_plan import ServeOptions, plan_services
from services.client.shared_card import (
    chosen_level,
    divide_among_models,
    fitting_level,
    weights_bytes_of,
)
from services.settings.flags import UsageError
from tests.support.processes import ROOT

TINY = str(ROOT / "models" / "checkpoints" / "tiny")
GIB = 2**30


@pytest.fixture(autouse=True)
def _no_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def plan(models, engine=(), frontend=(), **changes):
    options = {
        "engine_words": [],
        "frontend_words": [],
        "num_engines": 1,
        "listen_flags": ["--port", "0"],
        **changes,
    }
    division = Division(models=list(models), engine=list(engine), frontend=list(frontend))
    return plan_services(division, ServeOptions(**options))


@pytest.fixture
def other(tmp_path):
    renamed = tmp_path / "renamed"
    renamed.mkdir()
    for file in (ROOT / "models" / "checkpoints" / "tiny").iterdir():
        (renamed / file.name).symlink_to(file)
    return str(renamed)


def test_a_flag_given_once_is_every_models_and_one_given_often_is_divided():
    words = ["--max-model-len=64", "--max-num-seqs=1", "--max-num-seqs=2", "--enforce-eager"]
    common, own = divide_among_models(words, 2)
    assert common == ["--max-model-len=64", "--enforce-eager"]
    assert own == [["--max-num-seqs=1"], ["--max-num-seqs=2"]]
    assert divide_among_models(["--no-enforce-eager", "--enforce-eager"], 2) == (
        [], [["--no-enforce-eager"], ["--enforce-eager"]],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-num-seqs=1"] * 2, "--max-num-seqs is given 2 times for 3 models: give it once"),
        (["--max-loras=2"] * 2, "--max-loras is given 2 times for 3 models: give it once"),
    ],
)
def test_flags_that_cannot_be_divided_are_refused(words, message):
    with pytest.raises(ServeFlagError, match=message):
        divide_among_models(words, 3)


def test_level_1_is_taken_where_the_host_holds_all_weights():
    lines = []
    assert fitting_level(0, [16 * GIB, 8 * GIB], lines.append, 24 * GIB) == 1
    assert fitting_level(1, [16 * GIB, 8 * GIB], lines.append, 24 * GIB) == 1
    assert fitting_level(2, [16 * GIB, 8 * GIB], lines.append, GIB) == 2
    assert lines == []


def test_too_little_host_memory_means_level_2_or_the_end_of_the_start():
    lines = []
    assert fitting_level(0, [16 * GIB, 8 * GIB], lines.append, 20 * GIB) == 2
    [line] = lines
    assert "take 16.0 + 8.0 GiB, and the host has 20.0 GiB free" in line
    with pytest.raises(ServeFlagError, match=r"20\.0 GiB free .*: --swap-level 2 loads them again"):
        fitting_level(1, [16 * GIB, 8 * GIB], lines.append, 20 * GIB)


def test_the_level_is_read_from_flags_and_the_environment():
    assert chosen_level([], {}) == 0
    assert chosen_level(["--swap-level=2"], {}) == 2
    assert chosen_level(["--swap-level", "1"], {"OCTAVO_FRONTEND_SWAP_LEVEL": "2"}) == 1
    assert chosen_level([], {"OCTAVO_FRONTEND_SWAP_LEVEL": "2"}) == 2
    with pytest.raises(ServeFlagError, match="--swap-level"):
        chosen_level(["--swap-level=x"], {})


def test_weights_are_the_sizes_of_the_checkpoints_files(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"12")
    (tmp_path / "b.safetensors").write_bytes(b"345")
    (tmp_path / "config.json").write_bytes(b"6")
    assert weights_bytes_of(["--model", str(tmp_path)]) == 5
    assert weights_bytes_of(["--model", str(tmp_path / "b.safetensors")]) == 3
    assert weights_bytes_of([]) == 0


def test_each_model_gets_an_engine_that_starts_asleep(other):
    made = plan([TINY, other], ["--max-num-seqs=1", "--max-num-seqs=2", "--block-size=16"])
    assert made.engine_words == ["--block-size=16", "--enable-sleep", "--start-asleep"]
    assert made.model_words == [
        ["--model", TINY, "--max-num-seqs=1"], ["--model", other, "--max-num-seqs=2"],
    ]  # fmt: skip
    assert made.names == ["tiny", "renamed"]
    assert made.frontend_words == ["--swap-level", "1"]
    assert made.environments == [{}, {}]
    assert "tiny, renamed share the card" in made.remarks[-1]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_engines": 2}, ServeFlagError, "--engines 2 is for one model; 2 models share a card"),
        ({"engine": ["--served-model-name=x"]}, ServeFlagError, "2 models have the name 'x'"),
        ({"frontend": ["--processes=2"]}, UsageError, "--swap-level and --processes exclude"),
        ({"frontend": ["--allow-sleep"]}, UsageError, "--swap-level and --allow-sleep exclude"),
        ({"frontend": ["--swap-level=3"]}, UsageError, "--swap-level"),
        ({"engine": ["--max-num-seqs=1", "--max-num-seqs=0"]}, UsageError, "--max-num-seqs is '0'"),
    ],
)
def test_a_shared_card_is_refused_before_anything_starts(other, changes, error, message):
    with pytest.raises(error, match=message):
        plan([TINY, other], **changes)


def test_one_model_can_be_served_twice_with_names_of_its_own():
    made = plan([TINY, TINY], ["--served-model-name=a", "--served-model-name=b"])
    assert made.names == ["a", "b"]
    with pytest.raises(ServeFlagError, match="2 models have the name 'tiny': give --served-model"):
        plan([TINY, TINY])


def test_each_adapter_goes_to_the_model_that_it_names(other):
    words = ["--lora=tiny:a=/a,renamed:b=/b", "--lora=renamed:x/y:z=/c", "--max-loras=2"]
    made = plan([TINY, other], words)
    assert made.engine_words[0] == "--max-loras=2"
    assert made.model_words == [
        ["--model", TINY, "--lora=a=/a"],
        ["--model", other, "--lora=b=/b", "--lora=x/y:z=/c"],
    ]


@pytest.mark.parametrize(
    ("adapters", "message"),
    [
        (["a=/a"], "'a=/a': with several models it must be MODEL:NAME=PATH, with one of tiny, ren"),
        (["absent:a=/a"], "it must be MODEL:NAME=PATH"),
        (["tiny:a=/a", "renamed:a=/b"], "--lora gives 'a' to two adapters, or to one and a model"),
        (["tiny:renamed=/a"], "--lora gives 'renamed' to two adapters, or to one and a model"),
        (["tiny:a"], "must be NAME=PATH"),
    ],
)
def test_adapters_that_fit_no_model_are_refused(other, adapters, message):
    words = [f"--lora={each}" for each in adapters]
    with pytest.raises((ServeFlagError, UsageError), match=message):
        plan([TINY, other], words)


def test_one_model_has_no_level_of_swaps():
    with pytest.raises(ServeFlagError, match="give --model for each"):
        plan([TINY], frontend=["--swap-level=1"])
