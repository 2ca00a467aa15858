"""Programs that another process traces, without weights and without a device."""

import json

import pytest
import torch

from models.parallel.group import ParallelGroup
from services.engine.config.engine_config import EngineConfig
from services.engine.worker.placement import rank_places
from services.engine.worker.start.loaded_model import LoadedModel
from services.engine.worker.start.model_trace import TraceBuild, TraceProcess
from services.engine.worker.start.ranks import Ranks
from tests.support.forked_program import run_forked
from tests.support.random_checkpoints import VARIANTS, write_checkpoint

PROGRAMS = ("model", "draft_0")
FAMILIES = {row[0]: name for name, row in sorted(VARIANTS.items(), reverse=True)}
"""One variant of each."""


def config_of(folder, cache, **flags):
    return EngineConfig.from_flags(
        model=folder,
        device="cpu",
        num_kv_blocks=64,
        block_size=4,
        max_num_seqs=8,
        log_level="warning",
        compile_cache_dir=cache,
        **{
            "max_num_batched_tokens": 64,
            "compilation_level": 3,
            "use_inductor": False,
            **flags,
        },
    )


def programs(loaded):
    """Returns the programs on disk, without the signatures that a compiler would ask for."""
    payloads = [loaded.trace.cache.load_program(name) for name in PROGRAMS]
    contents = [payload and json.loads(payload) for payload in payloads]
    for content in filter(None, contents):
        for _, program in content["programs"]:
            for code in program["codes"]:
                code[1] = None
    return contents


@pytest.mark.parametrize("variant", sorted(FAMILIES.values()))
def test_shapes_alone_give_the_programs_of_the_model(tmp_path, variant):
    torch.set_num_threads(1)
    write_checkpoint(tmp_path, variant)
    drafts = {"num_speculative_tokens": 1} if "mtp" in variant else {}
    here = LoadedModel.load(config_of(tmp_path, tmp_path / "here", **drafts))
    config = config_of(tmp_path, tmp_path / "there", **drafts)
    there = LoadedModel.load(config, may_trace_later=True)
    assert there.lacks_trace
    TraceBuild(there.trace).build()
    assert programs(here)[0] is not None
    assert programs(there) == programs(here)
    traced = there.with_trace()
    assert traced.traced.trace is None
    assert traced.traced.pass_matches == here.traced.pass_matches
    later = LoadedModel.load(config, may_trace_later=True)
    assert not later.lacks_trace
    assert later.traced.trace is None


@pytest.mark.parametrize("flags", [{}, {"max_model_len": 32}, {"quantization": "fp8"}])
def test_a_later_start_runs_the_trace_of_an_earlier_one_from_the_first_step_on(
    folder, tmp_path, flags
):
    config = config_of(folder, tmp_path, **flags)
    assert LoadedModel.load(config).traced.trace is not None
    later = LoadedModel.load(config, may_trace_later=True)
    assert later.traced.trace is None
    assert not later.will_change


@pytest.mark.parametrize(
    "change", [{"max_num_batched_tokens": 32}, {"debug_dump_path": "dump"}, {"compile_ranges": [8]}]
)
def test_a_later_start_that_needs_another_trace_serves_before_it_has_it(folder, tmp_path, change):
    LoadedModel.load(config_of(folder, tmp_path))
    later = LoadedModel.load(config_of(folder, tmp_path, **change), may_trace_later=True)
    assert later.lacks_trace
    assert later.will_change


class RanksWithoutTrace(Ranks):
    """Ranks of which another one has kept no trace."""

    def least(self, value):
        return min(value, 0)


def test_a_rank_does_not_run_a_kept_trace_that_another_one_lacks(folder, tmp_path):
    config = config_of(folder, tmp_path)
    LoadedModel.load(config)
    ranks = RanksWithoutTrace(place=rank_places(config.parallel)[0])
    assert LoadedModel.load(config, ranks=ranks, may_trace_later=True).lacks_trace


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_a_dense_model_leaves_a_compiler_nothing_to_do(folder, tmp_path, rank):
    config = config_of(folder, tmp_path, tensor_parallel_size=2)
    ranks = Ranks(place=rank_places(config.parallel)[rank], group=ParallelGroup(rank=rank, size=2))
    assert LoadedModel.load(config, ranks=ranks).traced.has_own_kernels_only


LATER_START = """
import sys

import services.engine.worker.process
from services.engine.config.engine_config import EngineConfig
from services.engine.worker.start.loaded_model import LoadedModel

config = EngineConfig.model_validate_json(sys.argv[1])
loaded = LoadedModel.load(config, may_trace_later=True)
assert not loaded.will_change
assert loaded.compile(loaded.config.compilation, None) is None
imported = {"sympy", "torch._dynamo", "torch._inductor"} & sys.modules.keys()
assert not imported, imported
"""


def test_a_later_start_imports_no_compiler(folder, tmp_path):
    config = config_of(folder, tmp_path, use_inductor=True)
    LoadedModel.load(config)
    run_forked("-c", LATER_START, config.model_dump_json(), modules=["torch"]).check_returncode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, "qwen3")
    return folder


WORKER = """
import sys

from services.engine.config.engine_config import EngineConfig
from services.engine.worker.start.loaded_model import LoadedModel
from services.engine.worker.start.model_trace import TraceProcess

config, has_unsendable = EngineConfig.model_validate_json(sys.argv[1]), sys.argv[2] == "True"
process = TraceProcess.fork(config)
loaded = LoadedModel.load(config, may_trace_later=True)
if has_unsendable:
    loaded.model.unsendable = lambda: None
process.begin(loaded.trace)
process.finish()
assert (loaded.trace.cache.load_program("model") is None) == has_unsendable
traced = loaded.with_trace()
assert (traced.traced.trace is None) == (not has_unsendable)
"""
"""A process of its own: as a worker it has no other threads when it forks."""


@pytest.mark.parametrize("has_unsendable", [False, True])
def test_a_process_leaves_the_programs_on_disk_if_the_model_can_be_sent(
    folder, tmp_path, has_unsendable
):
    config = config_of(folder, tmp_path).model_dump_json()
    run_forked("-c", WORKER, config, str(has_unsendable)).check_returncode()


def test_code_that_a_compiler_would_generate_is_left_to_this_process(folder, tmp_path):
    config = config_of(folder, tmp_path, use_inductor=True, passes=[])
    loaded = LoadedModel.load(config, may_trace_later=True)
    if loaded.with_trace().traced.has_own_kernels_only:
        pytest.skip("the model has no other operators")
    with pytest.raises(ValueError, match="code to generate"):
        TraceBuild(loaded.trace).build()


@pytest.mark.parametrize(
    "flags",
    [
        {"compilation_level": 0},
        {"compilation_level": 1},
        {"capture_while_serving": False},
    ],
)
def test_no_process_is_forked_where_nothing_is_traced_while_serving(folder, tmp_path, flags):
    assert TraceProcess.fork(config_of(folder, tmp_path, **flags)) is None
