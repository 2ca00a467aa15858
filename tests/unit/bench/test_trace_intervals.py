"""Idle time of a device, from made-up traces."""

import pytest

from tests.bench.trace_intervals import (
    Interval,
    Work,
    device_use,
    merged,
    read_timeline,
    work_of_steps,
)


def launch(at: float, correlation: int) -> dict:
    return {
        "ph": "X",
        "cat": "cuda_runtime",
        "name": "cudaLaunchKernel",
        "ts": at,
        "dur": 1,
        "args": {"correlation": correlation},
    }


def kernel(start: float, end: float, correlation: int) -> dict:
    return {
        "ph": "X",
        "cat": "kernel",
        "name": "k",
        "ts": start,
        "dur": end - start,
        "args": {"correlation": correlation},
    }


def section(name: str, start: float, end: float) -> dict:
    return {
        "ph": "X",
        "cat": "user_annotation",
        "name": f"octavo {name}",
        "ts": start,
        "dur": end - start,
    }


def test_merged_joins_what_touches_or_overlaps():
    assert merged([Interval(5, 7), Interval(0, 2), Interval(1, 3), Interval(3, 4)]) == [
        Interval(0, 4),
        Interval(5, 7),
    ]


def test_merged_bridges_small_gaps():
    assert merged([Interval(0, 1), Interval(1.5, 2), Interval(4, 5)], gap=0.5) == [
        Interval(0, 2),
        Interval(4, 5),
    ]


def test_device_use_separates_gaps_between_steps_from_gaps_within():
    use = device_use(
        [
            [Interval(0, 10), Interval(12, 20)],
            [Interval(25, 35), Interval(30, 40)],
            [Interval(40, 50)],
        ]
    )
    assert use is not None
    assert (use.span_us, use.busy_us) == (50, 43)
    assert (use.idle_between_us, use.idle_within_us) == (5, 2)
    assert use.idle_between_share == pytest.approx(0.1)
    assert use.idle_within_share == pytest.approx(0.04)


def test_steps_that_overlap_leave_no_gap():
    use = device_use([[Interval(0, 10)], [Interval(8, 20)]])
    assert use is not None
    assert (use.span_us, use.busy_us) == (20, 20)
    assert (use.idle_between_us, use.idle_within_us) == (0, 0)


def test_one_step_says_nothing_about_gaps():
    assert device_use([[Interval(0, 10)]]) is None


def test_kernels_belong_to_the_step_that_launched_them():
    timeline = read_timeline(
        [
            section("execute", 0, 10),
            section("update", 10, 12),
            section("execute", 20, 30),
            launch(1, 100),
            launch(21, 101),
            launch(15, 102),  # outside of any step, as by another library
            kernel(5, 19, 100),
            kernel(19, 40, 101),
            kernel(41, 42, 102),
            kernel(43, 44, 103),  # of which no launch was seen
            {"ph": "M", "name": "process_name"},
        ]
    )
    assert timeline.device == [[Interval(5, 19)], [Interval(19, 40)]]
    assert timeline.host["update"] == [Interval(10, 12)]


def test_kernels_of_one_graph_share_its_launch():
    timeline = read_timeline(
        [section("execute", 0, 10), launch(1, 7), kernel(2, 3, 7), kernel(4, 5, 7)]
    )
    assert timeline.device == [[Interval(2, 3), Interval(4, 5)]]


def test_work_has_the_grid_and_threads_of_kernels():
    copy = kernel(5, 6, 7) | {"cat": "gpu_memcpy", "name": "copy"}
    shaped = kernel(2, 3, 7)
    shaped["args"] |= {"grid": [8, 2, 1], "block": [128, 1, 1]}
    steps = work_of_steps([section("execute", 0, 10), launch(1, 7), copy, shaped])
    assert steps == [[Work(Interval(2, 3), "k", "8x2x1/128"), Work(Interval(5, 6), "copy", "-")]]
