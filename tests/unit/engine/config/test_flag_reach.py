"""Flags that do nothing at the chosen level are refused or warned about, and help says so."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from services.engine.config.compilation import CompilationConfig
from services.engine.config.flag_reach import FLAG_REACH

REFUSED = {
    "compile_sizes": [8],
    "compile_ranges": [64],
    "inductor_compile_config": {"max_autotune": True},
    "debug_dump_path": Path("dump"),
}


def idle(device="cpu", **flags):
    return [flag for flag, _ in CompilationConfig(**flags).idle_flags(device)]


def test_every_flag_of_compilation_and_graphs_is_in_the_table():
    assert FLAG_REACH.keys() == CompilationConfig.model_fields.keys()


@pytest.mark.parametrize("flag", FLAG_REACH)
def test_help_says_where_a_flag_works(flag):
    description = " ".join(CompilationConfig.model_fields[flag].description.split())
    if reach := str(FLAG_REACH[flag]):
        assert description.endswith(f" Works {reach}.")
    else:
        assert "Works" not in description


def test_the_flags_that_are_refused_are_those_tested_here():
    assert REFUSED.keys() == {flag for flag, reach in FLAG_REACH.items() if reach.is_refused}


@pytest.mark.parametrize("flag", REFUSED)
@pytest.mark.parametrize("level", range(4))
def test_a_flag_that_would_do_nothing_is_refused_with_the_levels_it_works_on(flag, level):
    flags = {"compilation_level": level, flag: REFUSED[flag]}
    if level in FLAG_REACH[flag].levels:
        assert getattr(CompilationConfig(**flags), flag) == REFUSED[flag]
        return
    with pytest.raises(ValidationError) as error:
        CompilationConfig(**flags)
    (problem,) = error.value.errors()
    assert problem["loc"] == (flag,)
    assert f"it works {FLAG_REACH[flag]}; compilation_level is {level}" in problem["msg"]


def test_settings_of_inductor_are_refused_without_it():
    with pytest.raises(ValidationError, match="compilation_level is 3, without Inductor"):
        CompilationConfig(
            compilation_level=3, use_inductor=False, inductor_compile_config={"debug": True}
        )


def test_eager_runs_take_any_flags():
    assert CompilationConfig(enforce_eager=True, **REFUSED).compile_sizes == [8]


def test_values_that_ask_for_nothing_are_taken_at_every_level():
    assert not CompilationConfig(compile_sizes=[]).compile_sizes


def test_other_flags_without_effect_are_named():
    assert idle() == []
    assert idle(allow_unmatched_passes=True, use_inductor=False) == [
        "use_inductor",
        "allow_unmatched_passes",
    ]
    traced = {"compilation_level": 3, "allow_unmatched_passes": True}
    assert idle(**traced, use_inductor=False) == []
    assert idle(cudagraph_capture_sizes=[4], cuda_graph_sizes=[8]) == [
        "cudagraph_capture_sizes",
        "cuda_graph_sizes",
    ]
    assert idle("cuda", cudagraph_capture_sizes=[4], cuda_graph_sizes=[8]) == []
    assert idle("cuda", compilation_level=1, splitting_ops=["octavo::other"]) == ["splitting_ops"]
    assert idle(cudagraph_copy_inputs=True) == ["cudagraph_copy_inputs"]
    assert idle("cuda", cudagraph_copy_inputs=True) == []
    by_name = {"compilation_level": 3, "compile_sizes": ["cudagraph_capture_sizes"]}
    assert idle(cudagraph_capture_sizes=[4], **by_name) == []
