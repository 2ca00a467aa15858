"""Where the time of requests goes: each second belongs to one stage."""

import pytest

from services.engine.request_times import Stage
from tests.support.requests import make_request
from tests.support.scheduler_rig import Rig


def times(rig, request):
    """The request's seconds by stage, whose sum is its age."""
    seconds = request.times.seconds(rig.now_s)
    assert sum(seconds.values()) == pytest.approx(rig.now_s - request.arrival_s)
    return {stage: round(spent, 6) for stage, spent in seconds.items() if spent}


def made(rig, prompt=8, **options):
    return make_request(prompt, arrival_s=rig.now_s, **options)


def test_prefill_and_decode():
    rig = Rig(max_num_batched_tokens=4)
    request = made(rig, 8, max_tokens=3)
    rig.now_s += 1
    rig.add(request)
    rig.now_s += 2
    for seconds in (4, 8, 16, 32):
        rig.send()
        rig.now_s += seconds
        rig.receive()
    assert times(rig, request) == {
        Stage.PREPARED: 1, Stage.QUEUED: 2, Stage.PREFILL: 12, Stage.DECODE: 48,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("limits", "prompts", "stage"),
    [
        ({"max_num_seqs": 1}, (4, 4), Stage.FULL_ROWS),
        ({"max_num_batched_tokens": 4}, (12, 4), Stage.FULL_STEP),
        ({"num_blocks": 6}, (12, 12), Stage.FULL_CACHE),
    ],
)
def test_the_next_request_says_what_it_waits_for_and_the_others_wait_for_it(limits, prompts, stage):
    rig = Rig(**limits, enable_prefix_caching=False)
    first, second, third = requests = [made(rig, n, max_tokens=2) for n in (*prompts, 4)]
    rig.add(*requests)
    rig.send()
    rig.now_s += 5
    assert times(rig, first) == {Stage.PREFILL: 5}
    assert times(rig, second) == {stage: 5}
    assert times(rig, third) == {Stage.QUEUED: 5}
    rig.receive()
    rig.run()


def test_a_preempted_request_waits_again_and_counts_what_it_lost():
    rig = Rig(num_blocks=6, max_model_len=20, enable_prefix_caching=False)
    first, second = (made(rig, 8, max_tokens=8) for _ in range(2))
    rig.add(first, second)
    while not second.num_preemptions:
        rig.step()
        rig.now_s += 1
    assert second.times.num_recomputed_tokens >= 8
    assert second.times.stage in (Stage.QUEUED, Stage.FULL_CACHE)
    rig.run()
    stages = list(second.times.seconds(rig.now_s))
    assert stages[-1] is Stage.DECODE or Stage.DECODE in stages
    assert Stage.PREFILL in stages
    assert first.times.num_recomputed_tokens == 0


def test_the_same_stage_goes_on():
    rig = Rig()
    request = made(rig)
    rig.now_s += 1
    request.times.enter(Stage.PREPARED, rig.now_s)
    rig.now_s += 1
    assert times(rig, request) == {Stage.PREPARED: 2}
