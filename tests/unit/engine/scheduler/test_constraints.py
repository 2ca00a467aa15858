"""A request whose next token is decided on the host between two of its tokens."""

import pytest

from services.engine.batch import read_int32
from services.engine.errors import InvalidRequestError, RequestFaultError
from tests.support.fake_worker import VOCAB_SIZE
from tests.support.requests import make_request
from tests.support.scheduler_rig import Rig
from tests.support.token_masks import ManualConstraint


def constrained(*, is_instant=True, **fields):
    request = make_request(**fields)
    request.constraint = ManualConstraint(
        lambda output: [len(output), 500], vocab_size=VOCAB_SIZE, is_instant=is_instant
    )
    return request


def test_it_waits_for_its_token_and_others_do_not():
    rig = Rig()
    plain, waiting = make_request(3), constrained(prompt=3)
    rig.add(plain, waiting)
    assert set(rig.send().requests) == {plain, waiting}
    assert rig.send().requests == [plain]
    rig.receive()
    assert set(rig.send().requests) == {plain, waiting}


def test_it_waits_for_its_mask_and_others_do_not():
    rig = Rig()
    plain, waiting = make_request(3), constrained(prompt=3, is_instant=False)
    rig.add(plain, waiting)
    rig.step()
    assert rig.send().requests == [plain]
    waiting.constraint.work_out()
    assert set(rig.send().requests) == {plain, waiting}


def test_masks_travel_for_its_row_alone():
    rig = Rig()
    plain, waiting = make_request(3), constrained(prompt=3)
    rig.add(plain, waiting)
    sampling = rig.send().descriptor.sampling
    assert read_int32(sampling.grammar_rows).tolist() == [1]
    assert len(sampling.grammar_masks) == 4 * -(-VOCAB_SIZE // 32)
    sampling = rig.send().descriptor.sampling
    assert not sampling.grammar_rows
    assert not sampling.grammar_masks


def test_its_position_survives_a_preemption():
    rig = Rig(num_blocks=5, max_num_batched_tokens=32)
    first = make_request(7, max_tokens=9)
    second = constrained(prompt=7, max_tokens=9)
    rig.add(first, second)
    rig.run()
    assert rig.scheduler.counts.num_preemptions
    assert second.constraint.token_ids == second.sink.token_ids[:-1]
    assert all(t in (i, 500) for i, t in enumerate(second.sink.token_ids))
    assert len(second.sink.token_ids) == 9


def test_it_runs_without_drafts_and_others_with_them():
    rig = Rig(num_speculative_tokens=3)
    plain, waiting = make_request(3), constrained(prompt=3)
    rig.add(plain, waiting)
    rig.step()
    drafts = read_int32(rig.send().descriptor.spec_decode_metadata.num_draft_tokens)
    assert drafts.tolist() == [3, 0]


@pytest.mark.parametrize(
    ("num_output", "error"),
    [(0, InvalidRequestError), (1, InvalidRequestError), (2, RequestFaultError)],
)
def test_without_a_token_min_tokens_is_the_cause_only_before_them(num_output, error):
    rig = Rig()
    request = constrained(prompt=3, min_tokens=2)
    rig.add(request)
    for _ in range(num_output):
        rig.step()
    step = rig.send()
    result = rig.worker.execute(step.descriptor)
    result.token_ids = b"\xff" * 4
    [output] = rig.scheduler.update(step, result)
    assert isinstance(output.error, error)
