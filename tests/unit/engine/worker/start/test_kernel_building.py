"""Builds in each process, with Triton's compiler and no GPU; each test is a program of its own."""

from textwrap import dedent

import pytest

from services.engine.config.worker import WorkerConfig
from services.engine.worker.start.kernel_building import KernelBuilding
from tests.support.programs import run_building

FEW_KERNELS = """
from models.kernels.elementwise import rms_norm, table_entries
from models.kernels.launching import kernel_builds
from triton.runtime.jit import JITFunction

modules = (rms_norm, table_entries)
functions = [each for module in modules for each in vars(module).values()]
functions = [each for each in functions if isinstance(each, JITFunction)]
kernel_builds.kernel_functions = lambda: functions
"""
"""Processes load no others, which takes each of them seconds."""
PROCESSES = """
from services.engine.worker.start.build_processes import BuildProcesses
from services.engine.worker.start.kernel_building import KernelBuilding, _load_kernel_functions

processes = BuildProcesses.fork(_load_kernel_functions)
"""
STEPS = """
import torch
from models.kernels.sampling.penalize_tokens import penalize_tokens
from models.kernels.elementwise.rms_norm import rms_norm
from models.kernels.elementwise.table_entries import write_entries
from tests.support.kernel_launches import absent_gpu
from triton import knobs

torch.set_num_threads(1)
x = torch.ones(3, 64, dtype=torch.bfloat16)
table = torch.zeros(4, 4, dtype=torch.int32)
empty_at_launch = []

def first():
    empty_at_launch.append(torch.empty(1000, dtype=torch.int64).any())
    rms_norm(x, x[0].clone(), 1e-6)

def early():
    rms_norm(x.double(), x[0].double(), 1e-6)

def next_():
    rms_norm(x.float(), x[0].float(), 1e-6)

def soon():
    rms_norm(x.half(), x[0].half(), 1e-6)

def others():
    write_entries(table, table[:2])
"""
WATCHED = """
class Watched(BuildProcesses):
    orders = []

    def begin(self, builds, *, niceness=0):
        self.orders.append(([build.name for build in builds], niceness))
        return super().begin(builds, niceness=niceness)

processes = Watched(processes._pid, processes._connection)
builds_here = []

def note(*, src, cache_hit, **details):
    if not cache_hit:
        builds_here.append(src.name)

knobs.compilation.listener = note

def start():
    building = KernelBuilding(processes)
    building.build_first(first, early=early, next_=next_, soon=soon, others=others)
    building.build_others()
    next_()
    soon()
    others()
"""

ALL = "['_rms_norm_kernel'] * 4 + ['_write_entries_kernel']"


def run(cache, program, *, before=""):
    run_building(before + PROCESSES + STEPS + WATCHED + dedent(program), kept=cache)


@pytest.mark.slow
def test_all_is_built_elsewhere_once_and_nothing_the_next_time(tmp_path):
    run(
        tmp_path,
        f"""
        with absent_gpu() as launched:
            start()
        assert not builds_here, builds_here
        assert launched == {ALL}, launched
        orders = [(["_rms_norm_kernel"] * count, 0) for count in (2, 1, 1)]
        assert processes.orders == [*orders, (["_write_entries_kernel"], 10)]
        # Once where launches were skipped.
        assert not empty_at_launch[1]
        """,
    )
    run(
        tmp_path,
        f"""
        with absent_gpu() as launched:
            start()
        assert not builds_here and not processes.orders
        assert launched == {ALL}, launched
        """,
    )


@pytest.mark.slow
def test_only_what_is_missing_is_built(tmp_path):
    run_building(FEW_KERNELS + STEPS + "with absent_gpu(): others()", kept=tmp_path)
    run(
        tmp_path,
        f"""
        with absent_gpu() as launched:
            start()
        assert not builds_here, builds_here
        assert processes.orders == [(["_rms_norm_kernel"] * count, 0) for count in (2, 1, 1)]
        assert launched == {ALL}, launched
        """,
        before=FEW_KERNELS,
    )


@pytest.mark.slow
def test_without_the_processes_the_worker_builds_for_itself(tmp_path):
    run(
        tmp_path,
        f"""
        import os
        os.kill(processes._pid, 9)
        with absent_gpu() as launched:
            start()
        assert builds_here == launched == {ALL}, (builds_here, launched)
        """,
    )


@pytest.mark.slow
def test_a_missing_kernel_stops_steps_before_they_launch_more(tmp_path):
    run(
        tmp_path,
        """
        from models.kernels.launching.kernel_builds import (
            MissingKernelError, launches_skipped, only_kept_kernels, load_kernel_functions,
        )
        load_kernel_functions()
        with absent_gpu() as launched:
            others()
            for function in (first, next_):
                try:
                    with only_kept_kernels():
                        others()
                        function()
                except MissingKernelError as error:
                    assert str(error) == "_rms_norm_kernel"
                else:
                    raise AssertionError("nothing is kept of these")
            assert launched == ["_write_entries_kernel"] * 3, launched
            # What was launched before is skipped with the rest.
            with launches_skipped() as builds:
                others()
            assert [build.name for build in builds.values()] == ["_write_entries_kernel"]
            assert len(launched) == 3
            with only_kept_kernels():
                others()
            assert len(launched) == 4
        processes.stop()
        """,
    )


def test_without_kernels_nothing_is_forked_and_steps_run_once(tmp_path):
    building = KernelBuilding.fork(WorkerConfig(device="cpu"))
    ran = []
    building.build_first(
        lambda: ran.append("first"),
        early=lambda: ran.append("early"),
        next_=ran.clear,
        soon=ran.clear,
        others=ran.clear,
    )
    building.build_others()
    assert ran == ["first", "early"]
