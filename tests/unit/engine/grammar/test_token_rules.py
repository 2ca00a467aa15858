"""Allowed tokens and forbidden sequences, alone, beside a grammar, and in the scheduler."""

import random
from dataclasses import replace

import pytest

from services.engine.grammar.token_rules import (
    ForbiddenSequences,
    TokenRules,
    with_token_rules,
    without,
)
from services.engine.request import UNBOUNDED
from tests.support.fake_worker import VOCAB_SIZE, expected_output
from tests.support.requests import make_request, make_sampling
from tests.support.scheduler_rig import Rig
from tests.support.token_masks import ManualConstraint, mask_of

EVERY = frozenset(range(VOCAB_SIZE))


def allowed_by(mask):
    return {i for i in range(8 * len(mask)) if mask[i // 8] >> i % 8 & 1}


def completing(sequences, output):
    """The tokens that complete a sequence after an output."""
    return {each[-1] for each in sequences if output[len(output) - len(each) + 1 :] == each[:-1]}


@pytest.mark.parametrize("seed", range(8))
def test_sequences_are_found_as_a_plain_search_finds_them(seed):
    chance = random.Random(seed)
    sequences = [
        [chance.randrange(3) for _ in range(chance.randrange(2, 6))] for _ in range(seed + 1)
    ]
    forbidden, output = ForbiddenSequences(sequences), []
    for _ in range(300):
        assert forbidden.last_token_ids == completing(sequences, output)
        num_free, ends = 0, [[]]
        while not any(completing(sequences, output + end) for end in ends) and num_free < 3:
            num_free, ends = num_free + 1, [[*end, t] for end in ends for t in range(3)]
        assert min(forbidden.num_free_tokens, 3) == num_free
        output.append(chance.randrange(3))
        forbidden.advance(output[-1])


def test_without_sequences_every_token_is_free():
    assert ForbiddenSequences(()).num_free_tokens == UNBOUNDED - 1


def test_a_request_without_rules_keeps_its_constraint():
    inner = ManualConstraint(lambda _: [1], vocab_size=VOCAB_SIZE, is_instant=True)
    for constraint in (None, inner):
        assert (
            with_token_rules(make_sampling(), constraint, (), vocab_size=VOCAB_SIZE) is constraint
        )


def test_a_mask_has_what_the_grammar_and_the_rules_allow():
    inner = ManualConstraint(lambda _: [1, 2, 3, 4], vocab_size=VOCAB_SIZE, is_instant=False)
    sampling = make_sampling(
        allowed_tokens=mask_of([2, 3, 4, 5], VOCAB_SIZE), forbidden_sequences=((2, 3), (2, 2, 4))
    )
    rules = with_token_rules(sampling, inner, [9, 2], vocab_size=VOCAB_SIZE)
    assert allowed_by(rules.mask) == {2, 4}
    rules.advance(2)
    assert rules.mask is None
    inner.work_out()
    assert allowed_by(rules.mask) == {2}
    assert rules.num_free_tokens == 0
    assert allowed_by(without(rules.mask, [2])) == set()


def test_the_grammars_calls_pass_through():
    inner, seen = ManualConstraint(lambda _: [1], vocab_size=9, is_instant=True), []
    rules = TokenRules(None, ForbiddenSequences([(1, 2)]), vocab_size=9, inner=inner)
    rules.listen(lambda: seen.append("mask"), lambda _: seen.append("end"))
    rules.advance(1)
    inner.on_end(None)
    assert (seen, inner.token_ids) == (["mask", "end"], [1])
    rules.close()
    inner.on_end(None)
    assert seen == ["mask", "end"]


def ruled(request):
    request.constraint = with_token_rules(
        request.sampling, None, request.resumed_token_ids, vocab_size=VOCAB_SIZE
    )
    return request


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("limits", [{}, {"num_speculative_tokens": 3}, {"num_blocks": 6}], ids=str)
def test_an_output_avoids_sequences_with_drafts_and_preemptions_too(limits, size):
    requests, expected = [], []
    for prompt in (make_request(7).prompt_token_ids, make_request(6).prompt_token_ids):
        sampling = make_sampling(max_tokens=12)
        plain = expected_output(prompt, sampling)
        sequences = tuple(tuple(plain[i : i + size]) for i in (1, 4))
        lists = [list(each) for each in sequences]
        requests.append(
            ruled(make_request(prompt, sampling=replace(sampling, forbidden_sequences=sequences)))
        )
        expected.append(
            expected_output(
                prompt,
                sampling,
                allowed=lambda output, lists=lists: EVERY - completing(lists, output),
            )
        )
        assert expected[-1] != plain
    rig = Rig(**limits)
    rig.add(*requests)
    rig.run()
    assert [request.sink.token_ids for request in requests] == expected
    assert rig.scheduler.counts.num_preemptions > 0 or "num_blocks" not in limits


def test_a_long_sequence_holds_no_step_up_before_its_beginning():
    rig = Rig()
    request = ruled(make_request(3, forbidden_sequences=((1, 2, 3, 4),)))
    rig.add(request)
    assert [rig.send().requests, rig.send().requests] == [[request], [request]]


def test_allowed_tokens_hold_after_resumed_ones():
    allowed = mask_of([7, 8], VOCAB_SIZE)
    request = ruled(make_request(5, resumed_token_ids=[8, 8], max_tokens=6, allowed_tokens=allowed))
    rig = Rig()
    rig.add(request)
    rig.run()
    assert len(request.sink.token_ids) == 4
    assert set(request.sink.token_ids) <= {7, 8}
