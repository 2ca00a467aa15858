import sys

import pytest
from pydantic import ValidationError

from services.engine.__main__ import main
from services.engine.config.engine_config import EngineConfig
from services.engine.config.flags import describe_problems, read_flags
from services.engine.config.worker import WorkerConfig


def problems(*arguments):
    with pytest.raises(ValidationError) as error:
        read_flags(EngineConfig, arguments)
    return describe_problems(EngineConfig, error.value)


def test_flags_and_variables_have_flat_names_and_the_flag_wins(monkeypatch):
    monkeypatch.setenv("OCTAVO_ENGINE_MAX_NUM_SEQS", "7")
    monkeypatch.setenv("OCTAVO_ENGINE_BLOCK_SIZE", "8")
    config = read_flags(EngineConfig, ["--max-num-seqs", "9"])
    assert (config.scheduler.max_num_seqs, config.cache.block_size) == (9, 8)


def test_no_two_sections_have_a_flag_of_the_same_name():
    flags = [flag for section in EngineConfig.sections().values() for flag in section.model_fields]
    assert len(flags) == len(set(flags))
    assert not set(flags) & EngineConfig.model_fields.keys()


def test_help_explains_every_flag_in_the_group_of_its_section(capsys):
    with pytest.raises(SystemExit) as caught:
        read_flags(EngineConfig, ["--help"])
    assert caught.value.code == 0
    _, *groups = capsys.readouterr().out.split("options:")[1].split("\n\n")
    titles = [group.partition(":")[0] for group in groups[::2]]
    assert titles == list(EngineConfig.sections())
    for section, group in zip(EngineConfig.sections().values(), groups[1::2], strict=True):
        for flag in section.model_fields:
            assert f"--{flag.replace('_', '-')}" in group


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [
        (["--devices", "["], {}),
        (["--inductor-compile-config", "nonsense"], {}),
        ([], {"OCTAVO_ENGINE_PASSES": "[norm_linear"}),
        ([], {"OCTAVO_ENGINE_DEVICES": "[0"}),
        ([], {"OCTAVO_ENGINE_INDUCTOR_COMPILE_CONFIG": "nonsense"}),
    ],
)
def test_a_list_or_object_that_cannot_be_read_is_one_line(
    arguments, variables, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", ["engine", *arguments])
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main() == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("octavo engine: ")
    field = (*arguments, *(name.removeprefix("OCTAVO_ENGINE_") for name in variables))[0]
    assert field.lower().strip("-").replace("-", "_") in line.lower()
    assert any(reason in line for reason in ("must be", "delimiter", "Parsing error"))


@pytest.mark.parametrize("arguments", [["--frobnicate"], ["--port"]])
def test_arguments_that_are_no_flags_or_lack_a_value_are_one_line(arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["engine", *arguments])
    assert main() == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("octavo engine: ")
    assert arguments[0] in line


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("DEVICES", "[0, 1]", [0, 1]),
        ("DEVICES", "0, 1", [0, 1]),
        ("DEVICES", "0", [0]),
        ("DISABLE_PASS", "norm_linear,qk_norm_rope_cache", ["norm_linear", "qk_norm_rope_cache"]),
        ("TLS_ALLOWED_CLIENTS", "a.example", ["a.example"]),
        ("CUDAGRAPH_CAPTURE_SIZES", "auto", "auto"),
        ("CUDAGRAPH_CAPTURE_SIZES", "1,2", [1, 2]),
        ("INDUCTOR_COMPILE_CONFIG", '{"max_autotune": true}', {"max_autotune": True}),
    ],
)
def test_a_variable_takes_json_or_what_its_flag_takes(monkeypatch, variable, value, expected):
    monkeypatch.setenv(f"OCTAVO_ENGINE_{variable}", value)
    num_ranks = len(expected) if variable == "DEVICES" else 1
    config = read_flags(EngineConfig, ["--tensor-parallel-size", f"{num_ranks}"])
    assert config.flags()[variable.lower()] == expected


def test_a_name_that_is_no_text_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["engine", "--model", "/models/mod\udce9l"])
    assert main() == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("octavo engine: --model is '/models/mod\\udce9l': it has bytes that")


def test_no_number_is_without_bounds():
    unbounded = [
        flag
        for section in EngineConfig.sections().values()
        for flag, schema in section.model_json_schema()["properties"].items()
        for form in (schema, schema.get("items", {}), *schema.get("anyOf", ()))
        if form.get("type") in ("integer", "number") and "maximum" not in form
    ]
    assert unbounded == []


def test_an_unknown_flag_is_refused():
    with pytest.raises(ValidationError, match="max_seqs"):
        EngineConfig.from_flags(max_seqs=3)


def test_changed_flags_leave_the_others_as_they_were():
    config = EngineConfig.from_flags(max_num_seqs=3, block_size=8)
    changed = config.with_flags(block_size=4)
    assert changed.flags() == {**config.flags(), "block_size": 4}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--block-size", "0"], "--block-size is '0': Input should be greater than or equal to 1"),
        (
            ["--max-model-len", "1"],  # a prompt and an output take two tokens
            "--max-model-len is '1': Input should be greater than or equal to 2",
        ),
        (
            ["--compilation-level", "0", "--compile-sizes", "8"],
            "--compile-sizes is [8]: it works on level 3; compilation_level is 0",
        ),
        (
            ["--num-speculative-tokens", "2", "--block-size", "2"],
            "--num-speculative-tokens is 2: it must be less than block_size, which is 2",
        ),
        (
            ["--num-speculative-tokens", "4", "--max-model-len", "4"],
            "--num-speculative-tokens is 4: it must be less than max_model_len, which is 4",
        ),
    ],
)
def test_a_problem_names_its_flag(arguments, expected):
    assert problems(*arguments) == [expected]


def test_a_step_may_take_longer_on_a_cpu_unless_the_flag_says_otherwise():
    assert WorkerConfig().step_limit_s(on_cpu=False) == 60
    assert WorkerConfig().step_limit_s(on_cpu=True) == 600
    assert WorkerConfig(step_timeout_s=5).step_limit_s(on_cpu=True) == 5
