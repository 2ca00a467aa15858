"""The time that kernels add to a step, and the layer among them, from made-up steps."""

import pytest

from tests.bench.kernel_advances import Period, advances, find_period, short_name, usual_steps
from tests.bench.kernel_table import kernel_table, layer_us
from tests.bench.trace_intervals import Interval, Work


def work(start: float, end: float, name: str = "k") -> Work:
    return Work(Interval(start, end), name, "8x1x1/128")


def test_a_kernel_that_starts_early_owns_only_what_it_adds():
    step = advances([work(0, 10), work(6, 14), work(14, 15)])
    assert [each.own for each in step] == [10, 4, 1]
    assert [each.duration for each in step] == [10, 8, 1]
    assert [each.gap for each in step] == [0, 0, 0]


def test_a_kernel_that_ends_before_an_earlier_one_adds_nothing():
    step = advances([work(0, 10), work(2, 7), work(9, 12)])
    assert [each.own for each in step] == [10, 0, 2]


def test_idle_time_is_the_gap_of_the_kernel_after_it():
    step = advances([work(3, 10), work(2.5 + 10, 20)])
    assert [each.gap for each in step] == [0, 2.5]


def test_own_times_and_gaps_add_up_to_the_step():
    step = advances([work(1, 4), work(2, 9), work(3, 5), work(11, 12), work(11.5, 20)])
    assert sum(each.own + each.gap for each in step) == pytest.approx(19)


@pytest.mark.parametrize(
    ("kernels", "period"),
    [
        ("xy" + "abc" * 5 + "z", Period(begin=2, length=3, repeats=5)),
        ("abcabc", Period(begin=0, length=3, repeats=2)),
        # A kernel that a layer runs twice is no layer, nor are two layers.
        ("x" + "aab" * 4, Period(begin=1, length=3, repeats=4)),
        # Layers of two kinds by turns are one period.
        ("abcabd" * 3 + "z", Period(begin=0, length=6, repeats=3)),
        # The first layers differ from the others.
        ("ab" * 2 + "cde" * 6, Period(begin=4, length=3, repeats=6)),
        # The last kernels look like the beginning of another layer.
        ("abc" * 3 + "ab", Period(begin=0, length=3, repeats=3)),
    ],
)
def test_the_layer_is_the_period_that_covers_most(kernels, period):
    assert find_period(kernels) == period


@pytest.mark.parametrize("kernels", ["", "a", "abcd"])
def test_kernels_that_do_not_repeat_have_no_period(kernels):
    assert find_period(kernels) is None


def test_steps_with_other_kernels_are_left_out():
    usual = [work(0, 1, "a"), work(1, 2, "b")]
    steps = usual_steps([usual, [work(0, 1, "a")], usual])
    assert [[each.kernel.name for each in step] for step in steps] == [["a", "b"]] * 2
    assert usual_steps([]) == []


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("_wide_fp8_kernel", "_wide_fp8_kernel"),
        ("void at::native::(anonymous namespace)::gather<int>(int*)", "gather<int>(int*)"),
        ("nvjet_sm90_tst_256x128", "nvjet_sm90_tst_256x128"),
    ],
)
def test_names_lose_their_namespaces(name, short):
    assert short_name(name) == short


def two_kernels_of_five_layers() -> list[Work]:
    layers = [
        each
        for layer in range(5)
        for each in (
            work(10 * layer + 2, 10 * layer + 8, "attention"),
            work(10 * layer + 6, 10 * layer + 12, "product"),
        )
    ]
    return [work(0, 2, "embed"), *layers, work(53, 60, "head")]


def test_table_has_a_layer_its_surroundings_and_sums():
    steps = usual_steps([two_kernels_of_five_layers()] * 3)
    lines = [line.split() for line in kernel_table(steps)]
    assert lines[0][:5] == ["12", "kernels", "in", "60", "us,"]
    assert lines[1] == ["a", "layer:", "2", "kernels,", "5", "times", "from", "kernel", "1"]
    assert lines[3] == ["attention", "8x1x1/128", "6.0", "6.0", "0.00"]
    assert lines[4] == ["product", "8x1x1/128", "6.0", "4.0", "0.00"]
    assert lines[5] == ["layer", "12.0", "10.0", "0.00", "x", "5", "=", "50"]
    assert lines[7] == ["head", "8x1x1/128", "7.0", "1.00", "kernel", "11"]
    assert ["attention", "8x1x1/128", "6.00", "30", "30", "5"] in lines
    assert layer_us(steps) == [10.0] * 3


def test_table_of_kernels_that_do_not_repeat_has_only_sums():
    steps = usual_steps([[work(0, 2, "embed"), work(3, 9, "head")]])
    lines = kernel_table(steps)
    assert lines[1] == "no kernels repeat"
    assert [line.split()[0] for line in lines[3:]] == ["head", "embed"]
    assert layer_us(steps) == []
