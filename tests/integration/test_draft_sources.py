"""Engines that draft by prompt lookup or with a small model, over real sockets."""

import asyncio
import json
import shutil

import pytest
from tokenizers import Tokenizer

from services.engine.config.checkpoint import TINY_CHECKPOINT
from tests.support.engine_client import begin, engine_stub, generate, get_stats
from tests.support.processes import start_engine
from tests.support.random_checkpoints import write_checkpoint

LIMITS = {
    "device": "cpu",
    "max_model_len": 160,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "num_kv_blocks": 40,
    "block_size": 8,
}
PHRASE = list(range(300, 312))
REQUESTS = [
    (PHRASE * 3, {"max_tokens": 40}),
    (PHRASE * 2 + [7, 8], {"max_tokens": 30, "temperature": 1.0, "seed": 21}),
    ([20, 21, 22], {"max_tokens": 30, "logprobs": 2}),
    (PHRASE * 4, {"max_tokens": 30, "repetition_penalty": 1.1, "seed": 3}),
    ([*PHRASE, 4], {"max_tokens": 20, "stop_token_ids": list(range(0, 500, 8))}),
]
HEAD = TINY_CHECKPOINT.with_name("tiny_eagle3")
SOURCES = [
    {"speculative_method": "ngram"},
    {"draft_model": TINY_CHECKPOINT},
    {"draft_model": HEAD},
    {"draft_model": HEAD, "compilation_level": 3, "use_inductor": False},
    {"draft_model": HEAD, "compilation_level": 2, "cudagraph_mode": "piecewise"},
]


async def serve(**flags):
    running = start_engine(model=TINY_CHECKPOINT, **LIMITS, **flags)
    async with running as engine, engine_stub(engine.address) as stub:
        replies = await asyncio.gather(*(generate(stub, p, **how) for p, how in REQUESTS))
        lost = begin(stub, PHRASE * 3, max_tokens=100, ignore_eos=True)
        await anext(aiter(lost))
        lost.cancel()
        again = await generate(stub, PHRASE * 3, max_tokens=40)
        return [(r.token_ids, r.finish_reason) for r in (*replies, again)], await get_stats(stub)


@pytest.fixture(scope="module")
def expected():
    return asyncio.run(serve())[0]


@pytest.mark.parametrize("source", SOURCES, ids=str)
async def test_output_is_that_of_an_engine_without_drafts(expected, source):
    found, stats = await serve(num_speculative_tokens=3, min_speculative_tokens=3, **source)
    assert found == expected
    assert 0 < stats.accepted_draft_tokens <= stats.draft_tokens
    by_position = list(stats.accepted_per_position)
    assert sum(by_position) == stats.accepted_draft_tokens
    assert by_position == sorted(by_position, reverse=True)
    assert len(by_position) == 3


async def test_most_drafts_of_the_trained_head_hold():
    tokenizer = Tokenizer.from_file(str(TINY_CHECKPOINT / "tokenizer.json"))
    prompt = tokenizer.encode("Once upon a time,").ids
    running = start_engine(
        model=TINY_CHECKPOINT,
        **LIMITS,
        num_speculative_tokens=3,
        min_speculative_tokens=3,
        draft_model=HEAD,
    )
    async with running as engine, engine_stub(engine.address) as stub:
        await generate(stub, prompt, max_tokens=100)
        stats = await get_stats(stub)
        assert stats.accepted_draft_tokens > 0.5 * stats.draft_tokens > 0


async def test_a_request_may_go_without_drafts():
    long = {"max_tokens": 110, "ignore_eos": True}
    running = start_engine(
        model=TINY_CHECKPOINT,
        **LIMITS,
        num_speculative_tokens=3,
        min_speculative_tokens=3,
        speculative_method="ngram",
    )
    async with running as engine, engine_stub(engine.address) as stub:
        without = await generate(stub, PHRASE * 3, **long, num_speculative_tokens=0)
        assert (await get_stats(stub)).draft_tokens == 0
        with_one = await generate(stub, PHRASE * 3, **long, num_speculative_tokens=1)
        stats = await get_stats(stub)
        assert 0 < stats.draft_tokens == stats.num_verifications
        assert without.token_ids == with_one.token_ids


def refused(**flags):
    process = start_engine(model=TINY_CHECKPOINT, **LIMITS, **flags)
    process.start()
    try:
        assert process.wait(60) == 2
        return process.log
    finally:
        process.kill()


def test_a_draft_model_that_does_not_fit_is_refused_in_one_line(tmp_path):
    assert "is not a folder" in refused(draft_model=tmp_path / "none", num_speculative_tokens=2)
    write_checkpoint(tmp_path, "llama")
    log = refused(draft_model=tmp_path, num_speculative_tokens=2)
    assert "has a vocabulary of 97 tokens; the model has" in log
    other = tmp_path / "other"
    shutil.copytree(TINY_CHECKPOINT, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    names = list(tokenizer["model"]["vocab"])
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary[names[-1]], vocabulary[names[-2]] = vocabulary[names[-2]], vocabulary[names[-1]]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "has other tokens" in refused(draft_model=other, num_speculative_tokens=2)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"draft_model": TINY_CHECKPOINT}, "needs --num-speculative-tokens"),
        (
            {"draft_model": TINY_CHECKPOINT, "speculative_method": "ngram"},
            "exclude each other",
        ),
        ({"prompt_lookup_min": 5}, "must be at most --prompt-lookup-max"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(flags, reason):
    assert reason in refused(**flags)
