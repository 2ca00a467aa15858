"""Blocks that leave the GPU for the host's memory and come back.

The fake worker compares what every request reads with what its tokens dictate, so a block with
other content ends a test.
"""

import random

import pytest

from services.engine.batch import StepFailure, read_int32
from services.engine.kv_cache import snapshots, states
from services.engine.kv_cache.cache_groups import STATE, LayerGroup
from services.engine.kv_cache.host_tier import DiskNews, HostLimits
from services.engine.kv_cache.tiered_cache import AbsentBlocks
from tests.support.fake_worker import expected_output
from tests.support.requests import make_request
from tests.support.scheduler_rig import Rig

GROUPS = {
    "plain": (None,),
    "window": (None, 9),
    "window alone": (6,),
    "states": (None, STATE, STATE),
    "states alone": (STATE,),
    "all": (None, 5, STATE),
}
PAGES = 2


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch):
    """Snapshots every few tokens, so that short sequences have some."""
    monkeypatch.setattr(snapshots, "CHUNK", 8)
    monkeypatch.setattr(states, "LONG_PROMPT", 16)


def rig(*windows, num_slots=1000, max_step_loads=64, block_load_s=0.0, **fields) -> Rig:
    windows = windows or (None,)
    return Rig(
        host=HostLimits(
            num_slots=num_slots, max_step_loads=max_step_loads, block_load_s=block_load_s
        ),
        layer_groups=tuple(LayerGroup(layers=(0,), window=window) for window in windows),
        state_pages=PAGES if STATE in windows else 0,
        **fields,
    )


def run(a_rig: Rig, prompt: list[int], *, max_tokens=4, **fields):
    request = make_request(prompt, max_tokens=max_tokens, **fields)
    a_rig.add(request)
    a_rig.run()
    assert request.sink.token_ids == expected_output(prompt, request.sampling)
    return request


def overwrite_all(a_rig: Rig) -> None:
    """Runs prompts that take every block of the GPU."""
    for start in range(500, 860, 30):
        run(a_rig, list(range(start, start + 50)), max_tokens=1)


def counts(a_rig: Rig):
    return a_rig.scheduler.counts.tiers


@pytest.mark.parametrize("name", GROUPS)
def test_a_prompt_whose_blocks_were_reused_comes_back(name):
    a_rig = rig(*GROUPS[name], num_blocks=64)
    prompt = list(range(40))
    first = run(a_rig, prompt)
    overwrite_all(a_rig)
    again = run(a_rig, prompt)
    assert again.num_cached_tokens == (32 if STATE in GROUPS[name] else 36)
    assert again.sink.token_ids == first.sink.token_ids
    assert counts(a_rig).hit_tokens >= again.num_cached_tokens
    assert a_rig.scheduler.num_free_blocks == 63


def test_without_slots_nothing_is_copied():
    a_rig = rig(num_slots=0, num_blocks=16)
    run(a_rig, list(range(40)))
    overwrite_all(a_rig)
    assert run(a_rig, list(range(40))).num_cached_tokens == 0
    assert not counts(a_rig).num_stored


def test_another_salt_finds_nothing():
    a_rig = rig(num_blocks=20)
    run(a_rig, list(range(40)), cache_salt="one")
    overwrite_all(a_rig)
    assert run(a_rig, list(range(40)), cache_salt="other").num_cached_tokens == 0
    assert run(a_rig, list(range(40)), cache_salt="one").num_cached_tokens == 36


def test_a_long_prefix_comes_back_over_several_steps_while_others_decode():
    a_rig = rig(num_blocks=40, max_step_loads=3, max_num_batched_tokens=64)
    prompt = list(range(60))
    run(a_rig, prompt, max_tokens=1)
    overwrite_all(a_rig)
    decoding = make_request([7, 8, 9], max_tokens=30)
    returning = make_request(prompt, max_tokens=1)
    a_rig.add(decoding)
    a_rig.step()
    a_rig.add(returning)
    num_loaded = []
    while not returning.sink.outputs:
        step = a_rig.send()
        num_loaded.append(len(read_int32(step.descriptor.block_copies.loaded_to)))
        assert decoding in step.requests
        a_rig.receive()
    assert max(num_loaded) == 3
    assert sum(num_loaded) == 14
    assert returning.num_cached_tokens == 56
    a_rig.run()


def test_blocks_that_the_gpu_has_in_between_do_not_end_what_comes_back():
    a_rig = rig(num_blocks=64, max_step_loads=4)
    prompt = list(range(40))
    first = run(a_rig, prompt)
    overwrite_all(a_rig)
    cache = a_rig.scheduler.holdings[0].tiers
    in_between = AbsentBlocks(
        entries=[(0, key) for key in first.block_keys[2:4]],
        snapshot=None, held=[], held_snapshot=None, num_blocks=2,
    )  # fmt: skip
    cache.load(in_between)
    assert run(a_rig, prompt).num_cached_tokens == 36


def test_a_step_of_copies_alone_has_no_request():
    a_rig = rig(num_blocks=40, max_step_loads=4, max_num_batched_tokens=64)
    run(a_rig, list(range(60)), max_tokens=1)
    overwrite_all(a_rig)
    a_rig.add(make_request(list(range(60)), max_tokens=1))
    step = a_rig.send()
    assert not step.descriptor.context.batch_size
    assert not step.requests
    assert a_rig.receive() == []
    a_rig.run()
    assert counts(a_rig).hit_tokens == 56


def test_a_request_that_ends_while_it_loads_leaves_all_blocks_free():
    a_rig = rig(num_blocks=40, max_step_loads=2)
    run(a_rig, list(range(60)), max_tokens=1)
    overwrite_all(a_rig)
    request = make_request(list(range(60)), max_tokens=1)
    a_rig.add(request)
    a_rig.send()
    assert a_rig.scheduler.abort(request)
    a_rig.receive()
    assert a_rig.scheduler.num_free_blocks == 39
    assert a_rig.scheduler.schedule() is None
    assert run(a_rig, list(range(60)), max_tokens=1).num_cached_tokens == 56


def test_loading_that_is_slower_than_computing_is_left_out():
    a_rig = rig(num_blocks=40, block_load_s=1.0)
    run(a_rig, list(range(40)))
    overwrite_all(a_rig)
    assert run(a_rig, list(range(40))).num_cached_tokens == 0
    assert counts(a_rig).num_stored
    assert not counts(a_rig).num_loaded


def test_the_slot_used_least_lately_is_reused():
    a_rig = rig(num_blocks=16, num_slots=12)
    for start in range(0, 300, 30):
        run(a_rig, list(range(start, start + 30)), max_tokens=1)
    assert counts(a_rig).num_stored > 12
    assert run(a_rig, list(range(30))).num_cached_tokens == 0
    assert run(a_rig, list(range(210, 240))).num_cached_tokens > 0


def test_what_a_failed_step_would_have_copied_is_forgotten():
    a_rig = rig(num_blocks=40, max_num_batched_tokens=16)
    prompt = list(range(40))
    run(a_rig, prompt)
    overwrite_all(a_rig)
    request = make_request(prompt, max_tokens=4)
    a_rig.add(request)
    a_rig.send()
    a_rig.worker.memory_tokens = 1
    result = a_rig.worker.execute(a_rig.in_flight[0].descriptor)
    assert result.failure == StepFailure.STEP_FAILURE_OUT_OF_MEMORY
    a_rig.worker.memory_tokens = 2**31
    a_rig.scheduler.retreat(list(a_rig.in_flight))
    a_rig.in_flight.clear()
    a_rig.run()
    assert request.sink.token_ids == expected_output(prompt, request.sampling)


@pytest.mark.parametrize("has_disk", [False, True], ids=["host", "disk"])
@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("name", GROUPS)
def test_any_order_of_requests_reads_its_own_content(name, num_drafts, has_disk):
    order = random.Random(f"{name} {num_drafts}")
    a_rig = rig(
        *GROUPS[name],
        num_blocks=order.choice([56, 70]),
        num_slots=order.choice([30, 90, 400]),
        max_step_loads=order.choice([PAGES * 2, 9, 64]),
        num_speculative_tokens=num_drafts,
        max_num_waiting=1000,
        max_num_batched_tokens=24,
        disk={} if has_disk else None,
    )
    documents = [[order.randrange(900) for _ in range(50)] for _ in range(12)]
    live = []
    for _ in range(400):
        document = order.choice(documents)
        prompt = document[: order.randrange(8, 50)] + [order.randrange(900)] * order.randrange(3)
        salt = order.choice(["", "", "", "tenant"])
        live.append(
            make_request(prompt, max_tokens=order.randrange(1, 10), cache_salt=salt, priority=0)
        )
        a_rig.add(live[-1])
        if order.random() < 0.05:
            assert a_rig.scheduler.abort(live.pop(order.randrange(len(live))))
        if order.random() < 0.3:
            a_rig.scheduler.tiers[0].take_disk_news(a_rig.worker.take_disk_news())
        for _ in range(order.randrange(6)):
            step = a_rig.scheduler.schedule() if len(a_rig.in_flight) < 2 else None
            if step is not None:
                a_rig.in_flight.append(step)
            elif a_rig.in_flight:
                for output in a_rig.receive():
                    if output.is_last:
                        live.remove(output.request)
    requests = list(live)
    a_rig.run()
    for request in requests:
        assert request.sink.token_ids == expected_output(request.prompt_token_ids, request.sampling)
    assert counts(a_rig).num_stored > 100
    assert counts(a_rig).hit_tokens > 100


def flush(a_rig: Rig) -> None:
    """Runs steps of copies until all full blocks are on disk."""
    while (step := a_rig.scheduler.schedule()) is not None:
        assert not step.has_requests
        a_rig.in_flight.append(step)
        a_rig.receive()
    a_rig.scheduler.tiers[0].take_disk_news(a_rig.worker.take_disk_news())


@pytest.mark.parametrize("name", GROUPS)
def test_the_next_engine_finds_what_the_last_one_wrote(name):
    disk = {}
    prompt = list(range(40))
    a_rig = rig(*GROUPS[name], num_blocks=64, disk=disk)
    run(a_rig, prompt)
    flush(a_rig)
    assert counts(a_rig).num_written == len(disk) == a_rig.scheduler.tiers[0].num_disk_blocks > 0
    again = rig(*GROUPS[name], num_blocks=64, disk=disk)
    found = run(again, prompt)
    assert found.num_cached_tokens == counts(again).disk_hit_tokens
    assert found.num_cached_tokens == (32 if STATE in GROUPS[name] else 36)


def test_a_request_waits_for_the_disk_and_others_do_not():
    disk = {}
    a_rig = rig(num_blocks=64, disk=disk)
    run(a_rig, list(range(40)))
    flush(a_rig)
    a_rig = rig(num_blocks=64, disk=disk)
    waiting, other = make_request(list(range(40)), max_tokens=2), make_request([5], max_tokens=2)
    a_rig.add(waiting, other)
    assert a_rig.scheduler.num_waiting == 2
    assert a_rig.send().requests == [other]
    assert a_rig.scheduler.tiers[0].wake_s == 10
    a_rig.receive()
    a_rig.scheduler.tiers[0].take_disk_news(a_rig.worker.take_disk_news())
    assert a_rig.scheduler.tiers[0].wake_s is None
    assert waiting in a_rig.send().requests
    assert waiting.num_cached_tokens == 36


def test_a_disk_that_does_not_answer_is_not_waited_for():
    disk = {}
    a_rig = rig(num_blocks=64, disk=disk)
    run(a_rig, list(range(40)))
    flush(a_rig)
    a_rig = rig(num_blocks=64, disk=disk)
    request = make_request(list(range(40)), max_tokens=2)
    a_rig.add(request)
    assert not a_rig.send().has_requests  # it orders the reads
    assert a_rig.scheduler.schedule() is None
    a_rig.now_s += 10
    assert a_rig.scheduler.schedule().unsampled == [request]
    assert request.num_cached_tokens == 0


def test_a_file_that_is_lost_is_computed_and_written_again():
    disk = {}
    a_rig = rig(num_blocks=64, disk=disk)
    run(a_rig, list(range(40)))
    flush(a_rig)
    num_files = len(disk)
    a_rig = rig(num_blocks=64, disk=disk)
    del disk[next(iter(disk))]
    assert run(a_rig, list(range(40))).num_cached_tokens < 36
    flush(a_rig)
    assert len(disk) >= num_files
    assert a_rig.scheduler.tiers[0].num_disk_blocks == len(disk)


def test_a_request_that_ends_while_the_disk_reads_leaves_nothing():
    disk = {}
    a_rig = rig(num_blocks=64, disk=disk)
    run(a_rig, list(range(40)))
    flush(a_rig)
    a_rig = rig(num_blocks=64, disk=disk)
    request = make_request(list(range(40)), max_tokens=2)
    a_rig.add(request)
    assert a_rig.scheduler.abort(request)
    assert not a_rig.scheduler.has_work
    flush(a_rig)
    assert run(a_rig, list(range(40))).num_cached_tokens == 36


def test_slow_reads_are_left_out():
    disk = {}
    a_rig = rig(num_blocks=64, disk=disk)
    run(a_rig, list(range(40)))
    flush(a_rig)
    a_rig = rig(num_blocks=64, disk=disk)
    run(a_rig, list(range(500, 540)))
    a_rig.scheduler.tiers[0].take_disk_news(DiskNews(arrived=[b""], read_us=10**9))
    assert run(a_rig, list(range(40))).num_cached_tokens == 0
