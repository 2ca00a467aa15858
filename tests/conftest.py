"""Tests marked `gpu` skip without CUDA; with REQUIRE_GPU=1 in the environment a skip fails.

`gpu(2)` needs two. The variable says how many there must be: tests that need more may skip where
there are fewer.
"""

import gc
import os
import signal
import sys
import zlib

import hypothesis
import pytest
from hypothesis.internal.conjecture import providers

from tests.support.changed_sources import ChangedSources
from tests.support.matrices import ROOT, mark_more_cases, unconcerned

# A run that fails must fail again: examples depend on the test alone, not on chance or the clock,
# and not on the constants in modules that other tests have imported.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")
providers._get_local_constants = lambda: providers._local_constants

# A shell lets what it starts in the background ignore Ctrl-C, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Likewise nohup and SIGHUP: a handler, unlike SIG_IGN, is not inherited.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)

# Clients of tests would take a proxy of this machine's user even to loopback.
for name in ("no_proxy", "NO_PROXY"):
    os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1,localhost")))

# The threads of one product wait for each other in a loop. On cores that other tests use, too, that
# doubles what tests of small models cost. The workers of engines set a number of their own.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    for name in ("MKL_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
        os.environ.setdefault(name, "1")

# Steps of tests would spoil what is planned for engines that this machine's user runs.
os.environ["OCTAVO_ENGINE_HISTOGRAM_DIR"] = ""


def pytest_addoption(parser):
    parser.addoption(
        "--changed-since",
        metavar="REVISION",
        help="of matrices, run beside what always runs the cases that changes since then concern",
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA device, or as many as it says")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    # All tests and their modules live as long as the process: each look of the garbage collector
    # at them takes tenths of a second.
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


# Before pytest deselects by markers.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    # A case that is asked for by its name is not left out.
    if not any("::" in argument for argument in config.args):
        mark_more_cases(items)
    if revision := config.getoption("--changed-since"):
        left_out = unconcerned(items, ChangedSources.since(ROOT, revision))
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
    # Files with slow tests begin first, so that no process ends long after the others.
    slow_files = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow_files)
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    num_gpus = _num_gpus() if gpu_items else 0
    for item in gpu_items:
        needed = _num_needed(item)
        if needed > num_gpus:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPU" + "s" * (needed > 1)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    # Tensors that a test draws are its own, whatever ran before it.
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(zlib.crc32(item.nodeid.encode()))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    num_required = int(os.environ.get("REQUIRE_GPU") or 0)
    is_required = num_required and item.get_closest_marker("gpu")
    if is_required and _num_needed(item) > num_required:
        is_required = _num_gpus() >= _num_needed(item)
    if is_required and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped, and REQUIRE_GPU={num_required} forbids that"
    return report


def _num_needed(item):
    return next(iter(item.get_closest_marker("gpu").args), 1)


def _num_gpus():
    # Imported only for GPU tests: torch takes seconds, and most test runs need none.
    import torch

    return torch.cuda.device_count()
