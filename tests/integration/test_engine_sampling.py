"""Sampling through the real engine, judged by transformers on the same checkpoint."""

import asyncio
import shutil

import grpc
import pytest
import torch

from protos.common.v1.sampling_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP
from protos.engine.v1.engine_pb2 import GetModelInfoRequest
from services.engine.config.checkpoint import TINY_CHECKPOINT
from tests.support.engine_client import engine_stub, generate, get_stats
from tests.support.pace import together
from tests.support.processes import start_engine
from tests.support.random_checkpoints import SHAPE, write_checkpoint
from tests.support.step_driver import greedy_continuation
from tests.support.transformers_reference import TransformersReference
from tests.support.varied_prompts import varied_prompts

MAX_TOKENS = 32
EOS_TOKEN_IDS = [2, 0]
NO_TOKEN = 10**6
"""An end token that no model can choose."""
TOLERANCE = 1e-4
BFLOAT16_TOLERANCE = 0.25


@pytest.fixture(scope="module")
def reference() -> TransformersReference:
    return TransformersReference(TINY_CHECKPOINT)


@pytest.fixture(scope="module")
def prompts(reference) -> list[list[int]]:
    return [reference.encode(text, is_chat=is_chat) for text, is_chat in varied_prompts(16, seed=3)]


@pytest.fixture(scope="module")
def engine():
    with start_engine(kv_cache_memory_mb=16) as process:
        yield process


@pytest.fixture
async def stub(engine):
    async with engine_stub(engine.address) as connected:
        yield connected


async def generate_all(stub, prompts, **sampling):
    """Runs all prompts at once, so that they share steps."""
    return await asyncio.gather(*(generate(stub, prompt, **sampling) for prompt in prompts))


@pytest.mark.parametrize(
    ("sampling", "options"),
    [
        pytest.param({"ignore_eos": True}, {"eos_token_id": NO_TOKEN}, id="ignore_eos"),
        pytest.param({"min_tokens": 20}, {"min_new_tokens": 20}, id="min_tokens"),
        pytest.param({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}, id="repetition"),
        pytest.param(
            {"repetition_penalty": 0.8, "min_tokens": 5},
            {"repetition_penalty": 0.8, "min_new_tokens": 5},
            id="repetition-and-min_tokens",
        ),
    ],
)
async def test_greedy_output_is_that_of_transformers(stub, reference, prompts, sampling, options):
    replies = await generate_all(stub, prompts, max_tokens=MAX_TOKENS, **sampling)
    expected = [reference.generate(prompt, MAX_TOKENS, **options) for prompt in prompts]
    assert [reply.token_ids for reply in replies] == expected


async def test_only_allowed_tokens_are_chosen(stub, prompts):
    allowed = [5, 6, 40, 41]
    for prompt in prompts[:4]:
        reply = await generate(stub, prompt, max_tokens=9, allowed_token_ids=allowed, temperature=1)
        assert set(reply.token_ids) <= set(allowed)
        assert len(reply.token_ids) == 9
        ended = await generate(stub, prompt, max_tokens=9, allowed_token_ids=[EOS_TOKEN_IDS[0]])
        assert (ended.token_ids, ended.stop_token_id) == (EOS_TOKEN_IDS[:1], EOS_TOKEN_IDS[0])


async def test_forbidden_sequences_are_never_completed(stub, prompts):
    ordinary = await generate_all(stub, prompts, max_tokens=MAX_TOKENS, ignore_eos=True)
    for size in (1, 2, 3):
        runs = [reply.token_ids[4 : 4 + size] for reply in ordinary]
        replies = await asyncio.gather(
            *(
                generate(
                    stub,
                    prompt,
                    max_tokens=MAX_TOKENS,
                    ignore_eos=True,
                    forbidden_sequences=[{"token_ids": run}],
                )
                for prompt, run in zip(prompts, runs, strict=True)
            )
        )
        for reply, before, run in zip(replies, ordinary, runs, strict=True):
            at = next(i for i in range(MAX_TOKENS) if before.token_ids[i : i + size] == run)
            kept = at + size - 1
            assert reply.token_ids[:kept] == before.token_ids[:kept]
            assert reply.token_ids[kept] != before.token_ids[kept]
            spans = [reply.token_ids[i : i + size] for i in range(MAX_TOKENS)]
            assert run not in spans


async def test_rules_that_leave_no_token_end_the_request_alone(stub, prompts):
    with pytest.raises(grpc.aio.AioRpcError, match="after 2 tokens of output") as refused:
        await generate(
            stub,
            prompts[0],
            max_tokens=9,
            allowed_token_ids=[5],
            forbidden_sequences=[{"token_ids": [5, 5, 5]}],
        )
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (await generate(stub, prompts[0], max_tokens=3)).token_ids


@pytest.mark.parametrize("truncation", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
async def test_what_is_cut_down_to_one_token_is_greedy_at_any_temperature(
    stub, reference, prompts, truncation
):
    sampling = {"temperature": 2.0, "max_tokens": MAX_TOKENS, **truncation}
    replies = await generate_all(stub, prompts, **sampling)
    expected = [reference.generate(prompt, MAX_TOKENS) for prompt in prompts]
    assert [reply.token_ids for reply in replies] == expected


async def test_a_bias_moves_greedy_output_as_in_transformers(stub, reference, prompts):
    for prompt in prompts[:6]:
        usual = reference.generate(prompt, MAX_TOKENS)
        bias = {usual[0]: -100.0, usual[len(usual) // 2]: -2.5, 300: 4.0}
        reply = await generate(stub, prompt, max_tokens=MAX_TOKENS, logit_bias=bias)
        sequence_bias = {(token_id,): value for token_id, value in bias.items()}
        assert reply.token_ids == reference.generate(
            prompt, MAX_TOKENS, sequence_bias=sequence_bias
        )


async def test_a_stop_token_ends_the_request_and_is_named(stub, reference, prompts):
    for prompt in prompts[:6]:
        stop = reference.generate(prompt, MAX_TOKENS)[3]
        reply = await generate(stub, prompt, max_tokens=MAX_TOKENS, stop_token_ids=[stop])
        expected = reference.generate(prompt, MAX_TOKENS, eos_token_id=[*EOS_TOKEN_IDS, stop])
        assert reply.token_ids == expected
        assert (reply.finish_reason, reply.stop_token_id) == (FINISH_REASON_STOP, expected[-1])


async def test_stop_tokens_count_even_where_the_end_of_sequence_does_not(stub, reference, prompts):
    usual = reference.generate(prompts[0], MAX_TOKENS, eos_token_id=NO_TOKEN)
    sampling = {"max_tokens": MAX_TOKENS, "ignore_eos": True}
    reply = await generate(stub, prompts[0], stop_token_ids=[usual[4]], **sampling)
    assert reply.token_ids == usual[: usual.index(usual[4]) + 1]


async def test_a_request_ends_at_max_tokens_and_counts_them(stub, prompts):
    reply = await generate(stub, prompts[1], max_tokens=7, ignore_eos=True)
    assert (reply.finish_reason, reply.usage.output_tokens) == (FINISH_REASON_LENGTH, 7)
    assert reply.usage.prompt_tokens == len(prompts[1])
    assert reply.stop_token_id is None


@pytest.mark.parametrize("temperature", [0.0, 1.2])
async def test_logprobs_are_those_of_transformers(stub, reference, prompts, temperature):
    replies = await generate_all(
        stub, prompts, max_tokens=16, ignore_eos=True, logprobs=5, temperature=temperature, seed=5
    )
    for prompt, reply in zip(prompts, replies, strict=True):
        expected = reference.logprobs(prompt, reply.token_ids)
        for position, logprobs in zip(reply.logprobs, expected, strict=True):
            assert [top.logprob for top in position.top] == pytest.approx(
                logprobs.topk(5).values.tolist(), abs=TOLERANCE
            )
            for token in (position.chosen, *position.top):
                assert token.logprob == pytest.approx(
                    float(logprobs[token.token_id]), abs=TOLERANCE
                )
        assert [position.chosen.token_id for position in reply.logprobs] == reply.token_ids
        if temperature == 0:
            assert reply.token_ids == [position.top[0].token_id for position in reply.logprobs]


async def test_a_seed_gives_the_same_tokens_alone_in_a_batch_and_after_preemption(prompts):
    sampling = {"temperature": 1.0, "top_p": 0.95, "max_tokens": 48, "ignore_eos": True}
    flags = {"num_kv_blocks": 40, "max_model_len": 512, "max_num_batched_tokens": 64}
    async with start_engine(**flags) as process, engine_stub(process.address) as stub:
        short = [prompt for prompt in prompts if len(prompt) < 64]
        alone = [
            await generate(stub, prompt, seed=seed, **sampling) for seed, prompt in enumerate(short)
        ]
        assert (await get_stats(stub)).num_preemptions == 0
        async with together(process, len(short)):
            calls = asyncio.gather(
                *(generate(stub, text, seed=seed, **sampling) for seed, text in enumerate(short))
            )
        replies = await calls
        assert (await get_stats(stub)).num_preemptions > 0
        assert [reply.token_ids for reply in replies] == [reply.token_ids for reply in alone]
        other = await generate(stub, short[0], seed=999, **sampling)
        assert other.token_ids != alone[0].token_ids


async def test_bfloat16_on_a_cpu_answers_as_fp32_does_but_for_rounding(reference):
    sums = [(3, 4), (12, 7), (20, 20), (9, 0)]
    prompts = [reference.encode(f"What is {a} + {b}?", is_chat=True) for a, b in sums]
    async with (
        start_engine(dtype="bfloat16", device="cpu", kv_cache_memory_mb=16) as process,
        engine_stub(process.address) as stub,
    ):
        assert (await stub.GetModelInfo(GetModelInfoRequest())).dtype == "bfloat16"
        replies = await generate_all(stub, prompts, max_tokens=MAX_TOKENS, logprobs=0)
    for (a, b), prompt, reply in zip(sums, prompts, replies, strict=True):
        assert str(a + b) in reference.tokenizer.decode(reply.token_ids)
        expected = reference.logprobs(prompt, reply.token_ids)
        chosen = expected.gather(1, torch.tensor(reply.token_ids)[:, None])[:, 0].tolist()
        assert [position.chosen.logprob for position in reply.logprobs] == pytest.approx(
            chosen, abs=BFLOAT16_TOLERANCE
        )


@pytest.mark.parametrize("variant", ["llama", "llama_llama3_rope"])
async def test_llama_answers_as_transformers_does(tmp_path, variant):
    model = write_checkpoint(tmp_path, variant)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_CHECKPOINT / name, tmp_path)
    vocab_size = SHAPE["vocab_size"]
    prompts = [[(7 * i + 3 * k) % vocab_size for k in range(5 * i + 1)] for i in range(12)]
    flags = {"model": tmp_path, "num_kv_blocks": 100, "block_size": 8}
    async with (
        start_engine(**flags, max_num_batched_tokens=24) as process,
        engine_stub(process.address) as stub,
    ):
        replies = await generate_all(stub, prompts, max_tokens=12, ignore_eos=True)
    expected = [greedy_continuation(model, prompt, 12) for prompt in prompts]
    assert [reply.token_ids for reply in replies] == expected
