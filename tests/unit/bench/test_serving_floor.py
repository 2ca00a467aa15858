"""The floor of a workload, against sums made by hand."""

import pytest

from tests.bench.floor import BYTES_PER_MS, FLOP_PER_MS, StepFloor
from tests.bench.serving_floor import serving_floor
from tests.bench.workload import Job

BYTES_PER_S, FLOP_PER_S = 1000 * BYTES_PER_MS, 1000 * FLOP_PER_MS
JOBS = [Job([7] * 10, 3), Job([7] * 4, 1), Job([7] * 2, 2)]
"""After the prompts one step of two rows and one of one; the request of one token has no row."""


def floor_of(*, num_bytes, params, pair_flop=3.0, cached=((5.0, None),)):
    return StepFloor(
        dense_bytes=num_bytes,
        expert_bytes=0,
        dense_params=params,
        expert_params=0,
        head_params=params / 10,
        num_experts=1,
        top_k=1,
        cached=cached,
        pair_flop=pair_flop,
    )


def test_steps_of_few_rows_read_weights_and_prompts_multiply():
    params = 1e12
    floor = serving_floor(floor_of(num_bytes=BYTES_PER_S, params=params), JOBS)
    assert floor.prompt_products == 1.0  # reading takes longer than 16 tokens' products
    assert floor.decode_products == 2.0
    many = serving_floor(floor_of(num_bytes=1, params=params), JOBS)
    # 16 tokens of prompts, 3 of which are sampled from; rows of 2 and of 1.
    assert many.prompt_products == pytest.approx(2 * params * (16 + 0.3) / FLOP_PER_S)
    assert many.decode_products == pytest.approx(2 * params * 1.1 * 3 / FLOP_PER_S)


def test_each_row_reads_its_prompt_and_its_output_so_far():
    floor = serving_floor(floor_of(num_bytes=1, params=1), JOBS)
    assert floor.decode_attention == pytest.approx(
        5 * ((10 + 1) + (10 + 2) + (2 + 1)) / BYTES_PER_S
    )
    windowed = floor_of(num_bytes=1, params=1, cached=((5.0, None), (1.0, 4)))
    read = 5 * (11 + 12 + 3) + (4 + 4 + 3)
    assert serving_floor(windowed, JOBS).decode_attention == pytest.approx(read / BYTES_PER_S)


def test_prompts_attend_to_themselves():
    floor = serving_floor(floor_of(num_bytes=1, params=1), JOBS)
    assert floor.prompt_attention == pytest.approx(3 * (55 + 10 + 3) / FLOP_PER_S)


def test_one_after_the_other_is_the_sum_and_overlapped_the_larger_total():
    by_bytes = serving_floor(floor_of(num_bytes=BYTES_PER_S, params=1e12), JOBS)
    parts = by_bytes.figures()
    overlapped, total = parts.pop("overlapped"), parts.pop("one_after_the_other")
    assert total == pytest.approx(sum(parts.values()))
    # Weights for the prompts and for two steps, and the cache.
    assert overlapped == pytest.approx(3 + 5 * 26 / BYTES_PER_S)
    by_flop = serving_floor(floor_of(num_bytes=1, params=1e12, pair_flop=1e12), JOBS)
    flop = 1e12 * (2 * (16 + 0.3) + 68 + 2 * 1.1 * 3)
    assert by_flop.overlapped == pytest.approx(flop / FLOP_PER_S)
    assert by_flop.overlapped < by_bytes.overlapped < total


def test_requests_of_one_token_have_no_steps_after_their_prompts():
    floor = serving_floor(floor_of(num_bytes=BYTES_PER_S, params=1), [Job([7] * 4, 1)])
    assert floor.decode_products == floor.decode_attention == 0
    assert floor.overlapped == 1.0
