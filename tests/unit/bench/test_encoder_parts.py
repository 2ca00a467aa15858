"""The table of an encoder's kernels."""

from tests.bench.encoder_parts import table_of
from tests.bench.tower_floor import TowerFloor
from tests.bench.trace_intervals import Interval, Work, work_in_order


def work(start, end, name):
    return Work(Interval(start, end), name, "1x1x1/128")


def test_kernels_are_summed_by_kind_and_name_beside_their_floors():
    run = [
        (0, 30, "nvjet_tst_128x256"), (30, 50, "_segment_attention_kernel"),
        (55, 60, "triton_poi_fused_gelu_0"), (60, 100, "nvjet_tst_128x256"),
    ]  # fmt: skip
    works = [work(at + start, at + end, name) for at in (0, 200) for start, end, name in run]
    lines = table_of(works, 2, TowerFloor(products_ms=0.04, attention_ms=0.01, reads_ms=0.0))
    rows = {line.split()[0]: line.split()[1:] for line in lines}
    assert lines[0] == "4 kernels"
    assert rows["products"] == ["70", "40", "2"]
    assert rows["attention"] == ["20", "10", "1"]
    assert rows["other"] == ["5", "-", "1"]
    assert rows["gaps"] == ["5"]
    assert rows["nvjet_tst_128x256"] == ["1x1x1/128", "35.0", "70", "2"]


def test_work_is_in_order_of_its_start():
    events = [
        {"ph": "X", "cat": "kernel", "name": "b", "ts": 5, "dur": 1, "args": {}},
        {"ph": "X", "cat": "cpu_op", "name": "c", "ts": 1, "dur": 1},
        {"ph": "X", "cat": "kernel", "name": "a", "ts": 2, "dur": 1, "args": {}},
    ]
    assert [each.name for each in work_in_order(events)] == ["a", "b"]
