"""States of requests among the blocks: admission, snapshots, and who starts from them."""

from itertools import combinations
from random import Random

import pytest

from services.engine.batch import read_int32
from services.engine.kv_cache.cache_groups import STATE, LayerGroup
from tests.support.requests import make_request
from tests.support.scheduler_rig import Rig, q_lens

PAGES = 3
HYBRID = (None, STATE, STATE)


def rig(*windows, **fields) -> Rig:
    groups = tuple(LayerGroup(layers=(0,), window=window) for window in windows or HYBRID)
    sizes = {"max_num_batched_tokens": 256, "max_model_len": 512, "num_blocks": 200} | fields
    return Rig(layer_groups=groups, state_pages=PAGES, **sizes)


def run(a_rig: Rig, prompt: list[int], max_tokens: int = 4):
    request = make_request(prompt, max_tokens=max_tokens)
    a_rig.add(request)
    a_rig.run()
    return request


def test_a_prompt_is_cut_before_its_end_and_the_next_one_starts_there():
    a_rig = rig()
    first = make_request(list(range(100)), max_tokens=2)
    a_rig.add(first)
    assert q_lens(a_rig.send()) == [64]
    assert q_lens(a_rig.send()) == [36]
    a_rig.run()
    second = run(a_rig, list(range(100)))
    assert second.num_cached_tokens == 64
    assert second.sink.token_ids[:2] == first.sink.token_ids


def test_a_prompt_shorter_than_a_chunk_is_not_cut():
    a_rig = rig()
    a_rig.add(make_request(list(range(64)), max_tokens=2))
    assert q_lens(a_rig.send()) == [64]


def test_prompts_that_part_make_a_snapshot_where_they_do():
    a_rig = rig()
    shared = list(range(200))
    counts = a_rig.scheduler.counts
    run(a_rig, shared + [300] * 90)
    assert counts.recomputed_tokens == 0
    assert run(a_rig, shared + [400] * 90).num_cached_tokens == 0
    assert counts.recomputed_tokens == 192
    assert run(a_rig, shared + [500] * 90).num_cached_tokens == 192
    assert counts.recomputed_tokens == 192


def test_an_output_is_found_by_the_next_turn():
    a_rig = rig()
    prompt = list(range(100))
    first = run(a_rig, prompt, max_tokens=150)
    turn = prompt + first.sink.token_ids + [7, 8, 9]
    assert run(a_rig, turn).num_cached_tokens == 192


def test_decodes_go_on_in_their_columns_where_they_take_blocks_and_make_snapshots():
    a_rig = rig()
    a_rig.add(*(make_request([start, *range(60)], max_tokens=100) for start in range(3)))
    a_rig.step()
    decodes, num_saved = [], []
    while a_rig.scheduler.has_work:
        step = a_rig.send()
        decodes.append(step.decodes)
        num_saved.append(len(step.descriptor.state_metadata.saved_to))
        a_rig.receive()
    assert all(each.requests is decodes[0].requests for each in decodes)
    assert sum(map(bool, num_saved)) == 2


def test_snapshots_of_outputs_take_turns_at_the_same_blocks():
    """So their bundles stay whole, which costs the scheduler little, and leave others their place.

    The blocks of tokens, taken in between, come from one bundle and never from two at a time.
    """
    groups = tuple(LayerGroup(layers=(0,), window=window) for window in HYBRID)
    sizes = {"max_num_batched_tokens": 256, "max_model_len": 1000, "num_blocks": 5000}
    a_rig = Rig(layer_groups=groups, state_pages=100, **sizes)
    requests = [make_request([start, *range(90)], max_tokens=600) for start in range(3)]
    a_rig.add(*requests)
    saved: list[tuple[int, ...]] = []
    while a_rig.scheduler.has_work:
        descriptor = a_rig.send().descriptor
        blocks = read_int32(descriptor.state_metadata.saved_to).tolist()
        size = 2 * 100
        saved += [tuple(blocks[first : first + size]) for first in range(0, len(blocks), size)]
        a_rig.receive()
    assert len(saved) == a_rig.scheduler.counts.num_snapshots_made == 3 * 10
    assert len(set(saved)) <= 3 * 4
    assert all(not {*one} & {*other} for one, other in combinations(set(saved), 2))


def test_sessions_of_several_turns_compute_little_again():
    """All but the tail since the last snapshot of what was said, and new tokens, is found."""
    a_rig = rig(max_model_len=4000, num_blocks=9000, max_num_batched_tokens=512, max_num_seqs=8)
    said = [list(range(900)) for _ in range(6)]
    for turn in range(4):
        before = [len(each) for each in said]
        requests = [
            make_request([*tokens, *[turn, number] * (20 + 7 * number)], max_tokens=90)
            for number, tokens in enumerate(said)
        ]
        a_rig.add(*requests)
        a_rig.run()
        if turn:
            for length, request in zip(before, requests, strict=True):
                assert request.num_cached_tokens >= (length - 1) // 64 * 64
        said = [list(request.token_ids) for request in requests]


def test_an_output_goes_on_in_another_engine():
    prompt = list(range(100))
    whole = run(rig(), prompt, max_tokens=100).sink.token_ids
    for num_done in (1, 27, 28, 29, 90):
        other = rig()
        request = make_request(prompt, resumed_token_ids=whole[:num_done], max_tokens=100)
        other.add(request)
        other.run()
        assert whole[:num_done] + request.sink.token_ids == whole
        # The next turn starts from what both said.
        assert run(other, prompt + whole + [5, 6], max_tokens=2).num_cached_tokens == 192


def test_a_request_is_admitted_wherever_its_bytes_are_free():
    """Blocks of its states are anywhere among those of its tokens."""
    random, num_blocks = Random(7), 150
    a_rig = rig(num_blocks=num_blocks, max_num_seqs=32, max_num_waiting=64)
    for _ in range(20):
        live = [make_request(random.randrange(1, 40), max_tokens=200) for _ in range(20)]
        a_rig.add(*live)
        for _ in range(4):
            a_rig.step()
        running = list(a_rig.scheduler.running)
        for request in {*live} - {*random.sample(running, len(running) // 2)}:
            a_rig.scheduler.abort(request)
        kept = a_rig.scheduler.num_running
        num_tokens = min(250, 4 * (a_rig.scheduler.num_free_blocks - 2 * PAGES) - kept * 4)
        last = make_request(num_tokens, max_tokens=2)
        a_rig.add(last)
        a_rig.step()
        assert len(last.state_block_ids) == 2 * PAGES
        assert a_rig.scheduler.num_running == kept + 1
        for request in list(a_rig.scheduler.running):
            a_rig.scheduler.abort(request)
    assert a_rig.scheduler.num_free_blocks == num_blocks - 1


def test_long_prompts_have_snapshots_on_their_way():
    a_rig = rig(max_model_len=9000, max_num_batched_tokens=2100, num_blocks=4000)
    prompt = [token % 1000 for token in range(8900)]
    run(a_rig, prompt)
    assert run(a_rig, prompt[:4500] + [5] * 100).num_cached_tokens == 4160


def test_states_alone_have_no_blocks_of_tokens():
    a_rig = rig(STATE, num_blocks=1 + 4 * PAGES)
    first = run(a_rig, list(range(130)))
    assert not first.block_ids
    assert run(a_rig, list(range(130))).num_cached_tokens == 128


def test_the_state_of_a_snapshot_moves_where_no_block_is_free_for_a_copy():
    num_tokens = 130
    a_rig = rig(num_blocks=1 + -(-(num_tokens + 4) // 4) + 2 * PAGES)
    first = run(a_rig, list(range(num_tokens)))
    again = run(a_rig, list(range(num_tokens)))
    assert again.sink.token_ids == first.sink.token_ids


@pytest.mark.parametrize("num_blocks", [60, 90, 200])
def test_requests_that_preempt_each_other_end_as_alone(num_blocks):
    a_rig = rig(num_blocks=num_blocks, max_num_batched_tokens=70)
    prompts = [list(range(start, start + 70)) for start in (0, 0, 50, 200)]
    requests = [make_request(prompt, max_tokens=60) for prompt in prompts]
    a_rig.add(*requests)
    a_rig.run()
    alone = [run(rig(), prompt, max_tokens=60) for prompt in prompts]
    assert [r.sink.token_ids for r in requests] == [r.sink.token_ids for r in alone]
    assert a_rig.scheduler.num_free_blocks == num_blocks - 1


def test_equal_prompts_wait_for_the_first_ones_snapshot():
    a_rig = rig()
    requests = [make_request(list(range(100)), max_tokens=3) for _ in range(3)]
    a_rig.add(*requests)
    a_rig.run()
    assert [request.num_cached_tokens for request in requests] == [0, 64, 64]
    assert not a_rig.scheduler.running


def test_all_blocks_are_free_or_cached_in_the_end():
    a_rig = rig()
    for length in (64, 65, 100, 190, 300):
        run(a_rig, list(range(length)), max_tokens=70)
    scheduler = a_rig.scheduler
    assert scheduler.num_free_blocks == 199
    assert 0 < scheduler.num_cached_blocks <= 199


def with_drafts(**fields):
    """A rig whose worker drafts three tokens for each request, two of three rightly."""
    return rig(num_speculative_tokens=3, min_speculative_tokens=3, **fields)


def test_outputs_with_drafts_are_found_by_the_next_turn():
    a_rig = with_drafts()
    for start in range(30):
        prompt = list(range(start, start + 5 * start + 3))
        first = run(a_rig, prompt, max_tokens=150)
        turn = prompt + first.sink.token_ids + [7, 8, 9]
        # The worker checks that the state is that of these tokens.
        assert run(a_rig, turn).num_cached_tokens == (len(turn) - 4) // 64 * 64


@pytest.mark.parametrize("depth", [1, 2])
def test_a_snapshot_of_a_rejected_draft_is_dropped_and_made_again(depth):
    a_rig = with_drafts(max_model_len=2000, num_blocks=900)
    dropped, settle = [], a_rig.scheduler._holdings.cache.states.settle

    def watch(request):
        before = {each.num_tokens for each in request.snapshots}
        settle(request)
        dropped.extend(before - {each.num_tokens for each in request.snapshots})

    a_rig.scheduler._holdings.cache.states.settle = watch
    request = make_request([1, 2, 3], max_tokens=1500)
    a_rig.add(request)
    a_rig.run(depth=depth)
    num_made = a_rig.scheduler.counts.num_snapshots_made
    assert num_made == 1503 // 64 + len(dropped)
    assert bool(dropped) == (depth == 2)  # with one step in flight all results are known
    assert a_rig.scheduler.num_snapshots >= 1
    assert a_rig.scheduler.num_free_blocks == 899


@pytest.mark.parametrize("num_blocks", [75, 110, 200])
def test_requests_with_drafts_that_preempt_each_other_end_as_alone(num_blocks):
    a_rig = with_drafts(num_blocks=num_blocks, max_num_batched_tokens=70)
    prompts = [list(range(start, start + 70)) for start in (0, 0, 50, 200)]
    requests = [make_request(prompt, max_tokens=80) for prompt in prompts]
    a_rig.add(*requests)
    a_rig.run()
    alone = [run(rig(), prompt, max_tokens=80) for prompt in prompts]
    assert [r.sink.token_ids for r in requests] == [r.sink.token_ids for r in alone]
    assert a_rig.scheduler.num_free_blocks == num_blocks - 1
