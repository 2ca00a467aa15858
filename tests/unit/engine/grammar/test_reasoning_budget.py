"""A budget of reasoning tokens: in itself, in the scheduler with drafts, and before a grammar."""

import asyncio
import json

import pytest

from services.engine.grammar.compiler import GrammarCompiler
from services.engine.grammar.reasoning_budget import ReasoningBudget, ReasoningMarkers
from services.engine.request import UNBOUNDED
from services.engine.structured_output import GrammarKind, StructuredOutput
from services.transport.counts import LocalCounts
from tests.support.fake_worker import VOCAB_SIZE
from tests.support.requests import make_request
from tests.support.scheduler_rig import Rig
from tests.support.special_tokenizers import KINDS, end_token
from tests.support.token_masks import mask_of

OPEN, CLOSE, ANSWER = 900, 901, 902
TEXTS = {OPEN: b"<think>", CLOSE: b"</think>", ANSWER: b"Answer: "}
MARKERS = ReasoningMarkers(b"<think>", b"</think>", (CLOSE, ANSWER))
OPENED = ReasoningMarkers(b"", b"</think>", (CLOSE, ANSWER))


def decode(token_ids):
    return b"".join(TEXTS.get(each, b"x") for each in token_ids)


def budget(max_tokens, markers=OPENED):
    return ReasoningBudget(markers, max_tokens, decode, vocab_size=VOCAB_SIZE)


def after(constraint, *token_ids):
    for token_id in token_ids:
        constraint.advance(token_id)
    return constraint


def forced(constraint):
    """Returns the only token that may come next; None if any may."""
    if constraint.num_free_tokens:
        return None
    [token_id] = [t for t in range(VOCAB_SIZE) if constraint.mask == mask_of([t], VOCAB_SIZE)]
    return token_id


def test_the_end_is_forced_at_the_limit_and_the_answer_is_free():
    constraint = after(budget(3), 1, 2)
    assert constraint.num_free_tokens == 1
    assert forced(after(constraint, 3)) == CLOSE
    assert forced(after(constraint, CLOSE)) == ANSWER
    assert after(constraint, ANSWER).num_free_tokens == UNBOUNDED
    assert after(constraint, 1, OPEN, 2, 3, 4).num_free_tokens == UNBOUNDED


@pytest.mark.parametrize("markers", [MARKERS, OPENED], ids=["begun", "opened"])
def test_reasoning_that_ends_in_time_is_left_alone(markers):
    opening = [OPEN] if markers.begin else []
    constraint = after(budget(3, markers), *opening, 1, 2, CLOSE)
    assert constraint.num_free_tokens == UNBOUNDED


def test_only_an_output_that_begins_with_reasoning_has_a_limit():
    assert after(budget(2, MARKERS), 1).num_free_tokens == UNBOUNDED
    constraint = after(budget(2, MARKERS), OPEN)
    assert constraint.num_free_tokens == 2
    assert forced(after(constraint, 1, 2)) == CLOSE


def test_none_at_all_is_ended_at_once():
    assert forced(budget(0)) == CLOSE
    constraint = budget(0, MARKERS)
    assert constraint.num_free_tokens == 1  # it may be an answer
    assert forced(after(constraint, OPEN)) == CLOSE


def test_a_marker_may_be_spelled_over_several_tokens():
    TEXTS.update({910: b"a<", 911: b"/thin", 912: b"k>b", 913: b" \n<th", 914: b"ink>c"})
    assert after(budget(9), 1, 910, 911, 912).num_free_tokens == UNBOUNDED
    constraint = after(budget(4, MARKERS), 913)
    assert constraint.num_free_tokens == 5
    assert after(constraint, 914).num_free_tokens == 4
    assert forced(after(constraint, 910, 911, 911, 1)) == CLOSE


def tokens_of(request):
    return request.sink.token_ids


@pytest.mark.parametrize("num_drafts", [0, 1, 3])
@pytest.mark.parametrize("limit", [0, 1, 2, 5, 6])
def test_it_ends_exactly_at_the_limit_with_steps_in_flight_and_drafts(num_drafts, limit):
    rig = Rig(num_speculative_tokens=num_drafts)
    plain, limited = make_request(3, max_tokens=20), make_request(3, max_tokens=20)
    limited.constraint = budget(limit)
    rig.add(plain, limited)
    num_masked = 0
    while rig.scheduler.has_work or rig.in_flight:
        step = rig.scheduler.schedule() if len(rig.in_flight) < 2 else None
        if step is None:
            rig.receive()
            continue
        rig.in_flight.append(step)
        num_masked += bool(step.descriptor.sampling.grammar_rows)
    assert len(tokens_of(limited)) == len(tokens_of(plain)) == 20
    assert tokens_of(limited)[limit : limit + 2] == [CLOSE, ANSWER]
    assert num_masked == 2  # all other tokens are sampled as without a budget


def test_it_survives_a_preemption():
    rig = Rig(num_blocks=5, max_num_batched_tokens=32)
    first, limited = make_request(7, max_tokens=9), make_request(7, max_tokens=9)
    limited.constraint = budget(4)
    rig.add(first, limited)
    rig.run()
    assert rig.scheduler.counts.num_preemptions
    assert tokens_of(limited)[4:6] == [CLOSE, ANSWER]


@pytest.fixture
async def grammars():
    tokenizer = KINDS["byte_level"]()
    counts = LocalCounts()
    compiler = GrammarCompiler(
        tokenizer.to_str().encode(),
        vocab_size=tokenizer.get_vocab_size(),
        eos_token_ids=frozenset([end_token(tokenizer)]),
        max_live=1,
        timeout_s=20,
        num_threads=1,
        counts=counts,
    )
    yield tokenizer, compiler
    await compiler.close()


def limited(kind, texts=(), *, limit):
    return StructuredOutput(kind, texts, ("", "</think>"), limit)


async def test_without_a_form_it_takes_no_place_of_a_grammar(grammars):
    tokenizer, compiler = grammars
    for _ in range(3):
        constraint = await compiler.constrain(limited(None, limit=2))
        assert constraint.num_free_tokens == 2
        ids = tokenizer.encode("ab").ids
        spelled = ""
        for token_id in ids:
            constraint.advance(token_id)
        while not constraint.num_free_tokens:
            [token_id] = allowed_by(constraint.mask)
            constraint.advance(token_id)
            spelled += tokenizer.decode([token_id])
        assert spelled == "</think>"


async def test_a_resumed_output_goes_on_with_what_is_left(grammars):
    tokenizer, compiler = grammars
    constraint = await compiler.constrain(limited(None, limit=3), tokenizer.encode("ab").ids)
    assert constraint.num_free_tokens == 1


async def test_the_form_follows_the_forced_end_and_characters_are_completed(grammars):
    tokenizer, compiler = grammars
    schema = json.dumps({"type": "object", "properties": {}, "additionalProperties": False})
    constraint = await compiler.constrain(limited(GrammarKind.JSON_SCHEMA, (schema,), limit=2))
    computed = Arrivals(constraint)
    ids = tokenizer.encode("aé", add_special_tokens=False).ids
    assert len(ids) == 3  # the limit falls into a character
    for token_id in ids:
        assert token_id in allowed_by(constraint.mask)
        await computed.advance(token_id)
    text = ""
    while text != "</think>":
        [token_id] = allowed_by(constraint.mask)
        text += tokenizer.decode([token_id])
        await computed.advance(token_id)
    for token_id in tokenizer.encode("{}").ids:
        assert token_id in allowed_by(constraint.mask)
        await computed.advance(token_id)
    constraint.close()


class Arrivals:
    """Waits for the masks of a constraint."""

    def __init__(self, constraint):
        self._constraint, self._arrived = constraint, asyncio.Event()
        constraint.listen(self._arrived.set, lambda error: self._arrived.set())

    async def advance(self, token_id):
        self._arrived.clear()
        self._constraint.advance(token_id)
        await self._arrived.wait()


def allowed_by(mask):
    return [8 * i + bit for i, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1]
