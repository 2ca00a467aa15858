"""Drafts that requests have after a step."""

import pytest

from services.engine.batch import StepResult, pack_int32
from services.engine.request import RequestStatus
from services.engine.spec_decode.draft_plan import DraftPlan
from tests.support.requests import make_request

PLAN = DraftPlan(num_tokens=3, max_seq_len=12, num_written_ahead=2)


def running(num_tokens: int):
    request = make_request(num_tokens)
    request.status = RequestStatus.RUNNING
    request.max_num_tokens = 100
    request.num_computed_tokens = num_tokens + 2
    return request


def settle(*requests, num_next=3):
    drafts = [[10 * i + j for j in range(3)] for i in range(len(requests))]
    accepted = pack_int32([0] * len(requests))
    result = StepResult(draft_token_ids=pack_int32(drafts), num_accepted_tokens=accepted)
    PLAN.settle(requests, [0] * len(requests), result, num_next)


def test_what_was_computed_of_drafts_that_do_not_hold_is_void():
    request = running(8)
    settle(request)
    assert request.num_computed_tokens == 7
    assert request.draft_token_ids == [0, 1, 2]


def test_each_request_gets_its_own_drafts():
    first, second = running(4), running(5)
    settle(first, second)
    assert (first.draft_token_ids, second.draft_token_ids) == ([0, 1, 2], [10, 11, 12])


@pytest.mark.parametrize("num_next", [0, 1, 3])
def test_a_request_gets_as_many_drafts_as_were_ordered(num_next):
    request = running(8)
    settle(request, num_next=num_next)
    assert request.draft_token_ids == [0, 1, 2][:num_next]


@pytest.mark.parametrize(("num_tokens", "num_drafts"), [(9, 3), (10, 2), (12, 0), (13, 0)])
def test_drafts_end_where_the_sequence_must(num_tokens, num_drafts):
    request = running(num_tokens)
    settle(request)
    assert len(request.draft_token_ids) == num_drafts


@pytest.mark.parametrize("status", [RequestStatus.WAITING, RequestStatus.FINISHED])
def test_a_request_that_does_not_run_starts_over_without_drafts(status):
    request = running(8)
    request.status, request.num_computed_tokens = status, 0
    settle(request)
    assert (request.num_computed_tokens, request.draft_token_ids) == (0, [])


def test_blocks_reach_over_what_the_draft_layers_write_ahead():
    assert [PLAN.reach(end) for end in (5, 9, 11, 12)] == [7, 11, 12, 12]
    assert DraftPlan(num_tokens=1, max_seq_len=12, num_written_ahead=0).reach(5) == 5
