"""Steps for several pipeline stages."""

from services.engine.batch import read_int32
from tests.support.requests import make_request
from tests.support.scheduler_rig import Rig


def decoding(rig, count):
    """Adds requests and runs their prompts."""
    requests = [make_request([number, 7, 8], max_tokens=20) for number in range(count)]
    rig.add(*requests)
    rig.step()
    return requests


def test_steps_on_their_way_share_the_requests():
    rig = Rig(num_stages=2)
    requests = decoding(rig, 4)
    steps = [rig.send() for _ in range(2)]
    assert [len(step.requests) for step in steps] == [2, 2]
    assert {each for step in steps for each in step.requests} == set(requests)
    assert rig.scheduler.schedule() is None
    rig.receive()
    assert rig.send().requests == steps[0].requests


def test_a_step_tells_the_newest_tokens():
    rig = Rig(num_stages=2)
    requests = decoding(rig, 3)
    step = rig.send()
    told = read_int32(step.descriptor.sampling.last_token_ids).tolist()
    assert told == [each.token_ids[-1] for each in requests[:2]]


def test_chunks_of_a_prompt_follow_each_other_without_a_result():
    rig = Rig(num_stages=3, max_num_batched_tokens=8)
    rig.add(make_request(list(range(24)), max_tokens=2))
    assert [rig.send().descriptor.context.num_tokens for _ in range(3)] == [8, 8, 8]
    assert rig.scheduler.schedule() is None


def test_a_prompt_does_not_keep_a_decode_from_its_turn():
    rig = Rig(num_stages=2, max_num_batched_tokens=8, num_blocks=65)
    requests = decoding(rig, 2)
    long = make_request(list(range(50, 100)), max_tokens=2, priority=5)
    rig.add(long)
    steps = [rig.send() for _ in range(2)]
    for _ in range(4):
        rig.receive()
        steps.append(rig.send())
    for request in requests:
        assert sum(request in step.requests for step in steps) >= 2
    assert all(long in step.unsampled for step in steps)


def test_one_stage_is_told_nothing():
    rig = Rig()
    decoding(rig, 2)
    assert not rig.send().descriptor.sampling.last_token_ids
