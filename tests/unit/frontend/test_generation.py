"""Generate and Chat over loopback: the answer, its end, and what it cost."""

import grpc
import pytest

from protos.common.v1.sampling_pb2 import FinishReason, SamplingParams
from protos.frontend.v1 import frontend_pb2 as pb
from services.frontend.rpc import servicer
from services.frontend.rpc.writer import Writer
from tests.support.byte_tokenizer import reference_tokenizer
from tests.support.fake_engine import EOS_TOKEN_ID, FakeEngine, says
from tests.support.frontend_stack import frontend_stack
from tests.support.waiting import until

STOP = FinishReason.FINISH_REASON_STOP
LENGTH = FinishReason.FINISH_REASON_LENGTH


def generate(text: str = "one two", **options: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, options=pb.GenerationOptions(**options))


async def collect(call) -> list[pb.Output]:
    return [response.output async for response in call]


def text_of(outputs: list[pb.Output]) -> str:
    return "".join(output.text for output in outputs)


def tokens_of(outputs: list[pb.Output]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


@pytest.mark.parametrize("tokens_per_step", [1, 4])
async def test_an_engine_that_sends_more_tokens_than_it_may_is_cut_off(tokens_per_step):
    engine = FakeEngine(
        script=says("one two three four five six", eos=False),
        tokens_per_step=tokens_per_step,
        ignores_max_tokens=True,
    )
    async with engine, frontend_stack(engine) as stack:
        ask = generate(sampling=SamplingParams(max_tokens=3), request_id="mine")
        outputs = await collect(stack.stub.Generate(ask))
        assert (
            tokens_of(outputs)
            == reference_tokenizer().encode("one two three four five six").ids[:3]
        )
        assert outputs[-1].finish_reason == LENGTH
        assert outputs[-1].usage.output_tokens == 3
        await until(lambda: engine.aborted or not engine.live)
        assert stack.server.engine.counts.num_overruns == 1
        again = await collect(stack.stub.Generate(generate()))
        assert text_of(again) == "one two three four five six"


async def test_an_answer_ends_with_reason_and_usage_and_hides_its_end_token():
    async with FakeEngine() as engine, frontend_stack(engine) as stack:
        outputs = await collect(stack.stub.Generate(generate(request_id="mine")))
    last = outputs[-1]
    assert text_of(outputs) == "hello world"
    assert tokens_of(outputs)[-1] == EOS_TOKEN_ID
    assert (last.finish_reason, last.stop_token_id) == (STOP, EOS_TOKEN_ID)
    assert last.usage.prompt_tokens == len(reference_tokenizer().encode("one two").ids)
    assert last.usage.output_tokens == len(tokens_of(outputs))
    assert last.usage.cached_tokens == 2
    assert {output.request_id for output in outputs} == {"mine"}
    assert not any(output.finish_reason for output in outputs[:-1])


async def test_the_end_token_is_shown_neither_where_special_tokens_are():
    async with FakeEngine() as engine, frontend_stack(engine) as stack:
        outputs = await collect(stack.stub.Generate(generate(show_special_tokens=True)))
    assert text_of(outputs) == "hello world"


async def test_the_engine_gets_prompt_options_and_budget():
    sampling = SamplingParams(temperature=0, seed=7, max_tokens=1)
    request = generate(priority=2, cache_salt="salt", sampling=sampling)
    async with FakeEngine() as engine, frontend_stack(engine) as stack:
        outputs = await collect(stack.stub.Generate(request, timeout=10_000))
    [submit] = engine.submits
    assert submit.sampling == sampling
    assert (submit.priority, submit.cache_salt) == (2, "salt")
    assert 9_000_000 < submit.timeout_ms < 11_000_000
    assert outputs[-1].finish_reason == LENGTH
    assert submit.request_id == outputs[0].request_id != ""


async def test_a_call_without_deadline_has_no_budget():
    async with FakeEngine() as engine, frontend_stack(engine) as stack:
        await collect(stack.stub.Generate(generate()))
    assert not engine.submits[0].HasField("timeout_ms")


async def test_a_call_that_says_nothing_of_sampling_gets_a_seed_of_its_own():
    async with FakeEngine() as engine, frontend_stack(engine) as stack:
        for _ in range(2):
            await collect(stack.stub.Generate(generate()))
    first, second = (submit.sampling for submit in engine.submits)
    assert [field.name for field, _ in first.ListFields()] == ["seed"]
    assert first.seed != second.seed


async def test_token_prompts_are_used_as_they_are():
    request = pb.GenerateRequest(tokens=pb.TokenIds(ids=[5, 6, 7]))
    async with (
        FakeEngine(script=lambda prompt: [*prompt, EOS_TOKEN_ID]) as engine,
        frontend_stack(engine) as stack,
    ):
        outputs = await collect(stack.stub.Generate(request))
    assert tokens_of(outputs) == [5, 6, 7, EOS_TOKEN_ID]


async def test_a_conversation_goes_through_the_template():
    request = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="hello")])
    async with FakeEngine() as engine, frontend_stack(engine) as stack:
        outputs = await collect(stack.stub.Chat(request))
        prompt = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
        expected = reference_tokenizer().encode(prompt).ids
    assert outputs[-1].usage.prompt_tokens == len(expected)
    assert text_of(outputs) == "hello world"


@pytest.mark.parametrize("tokens_per_step", [1, 3, 100])
async def test_a_stop_string_ends_the_answer_and_the_engines_work(tokens_per_step):
    script = says("one two three four five", eos=False)
    async with (
        FakeEngine(script=script, tokens_per_step=tokens_per_step) as engine,
        frontend_stack(engine) as stack,
    ):
        outputs = await collect(stack.stub.Generate(generate(stop=["three", "unseen"])))
        await until(lambda: not engine.live)
    last = outputs[-1]
    assert text_of(outputs) == "one two "
    assert (last.finish_reason, last.stop_string) == (STOP, "three")
    shown = reference_tokenizer().decode(tokens_of(outputs))
    assert shown.startswith("one two three")
    assert "four" not in shown
    assert last.usage.output_tokens == len(tokens_of(outputs))
    assert last.usage.cached_tokens == 2


async def test_text_that_only_begins_a_stop_string_is_shown_at_the_end():
    async with FakeEngine(script=says("one two")) as engine, frontend_stack(engine) as stack:
        outputs = await collect(stack.stub.Generate(generate(stop=["two three"])))
    assert text_of(outputs) == "one two"
    assert outputs[-1].finish_reason == STOP
    assert not outputs[-1].HasField("stop_string")


async def test_characters_of_many_tokens_come_whole():
    text = "\N{HUGGING FACE}\N{SNOWMAN}"
    async with FakeEngine(script=says(text)) as engine, frontend_stack(engine) as stack:
        outputs = await collect(stack.stub.Generate(generate()))
    assert text_of(outputs) == text
    assert not any("\ufffd" in output.text for output in outputs)


async def test_half_a_character_at_the_end_shows_as_a_replacement():
    tokens = reference_tokenizer().encode("\N{SNOWMAN}").ids[:-1]
    async with FakeEngine(script=lambda _: tokens) as engine, frontend_stack(engine) as stack:
        outputs = await collect(stack.stub.Generate(generate()))
    assert text_of(outputs) == "\ufffd"
    assert outputs[-1].finish_reason == LENGTH


async def test_log_probabilities_come_beside_their_tokens():
    request = generate(sampling=SamplingParams(logprobs=0), stop=["world"])
    async with FakeEngine(tokens_per_step=2) as engine, frontend_stack(engine) as stack:
        outputs = await collect(stack.stub.Generate(request))
    for output in outputs:
        assert [entry.chosen.token_id for entry in output.logprobs] == list(output.token_ids)


async def test_a_client_that_leaves_ends_the_engines_work():
    async with FakeEngine() as engine, frontend_stack(engine) as stack:
        engine.pause()
        call = stack.stub.Generate(generate(request_id="gone"))
        await until(lambda: engine.live)
        call.cancel()
        await until(lambda: engine.aborted == ["gone"])
        await until(lambda: stack.server.engine.num_live == 0)


async def test_a_client_that_leaves_before_admission_ends_the_engines_work():
    async with FakeEngine() as engine, frontend_stack(engine, wait_ready=True) as stack:
        engine.pause()
        for _ in range(3):
            call = stack.stub.Generate(generate("x " * 5000), timeout=5)
            call.cancel()
        await until(lambda: not engine.live and not stack.server.engine.num_live)


async def test_a_deadline_ends_the_engines_work():
    async with FakeEngine() as engine, frontend_stack(engine) as stack:
        engine.pause()
        timeout_s = 0.15
        while not engine.submits:  # its time may be over before the engine has it
            timeout_s *= 2
            call = stack.stub.Generate(generate(request_id="late"), timeout=timeout_s)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await collect(call)
            assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: engine.aborted == ["late"] * len(engine.submits))


async def test_a_slow_reader_loses_its_stream_and_slows_no_other(monkeypatch):
    endless = reference_tokenizer().encode("hello world ").ids * 1_000_000
    engine = FakeEngine(
        script=lambda _: endless, tokens_per_step=4000, max_model_len=len(endless) + 10
    )
    async with engine, frontend_stack(engine, slow_reader_timeout_s=0.3) as stack:
        session = stack.stub.Session()
        for handle in range(24):
            await session.write(pb.SessionRequest(handle=handle, generate=generate()))
        await until(lambda: engine.aborted, timeout_s=60)
        await until(lambda: not stack.server.engine.num_live)
        engine.script = says("hello")
        # A reader that is not slow is not to look so on a machine that is.
        monkeypatch.setattr(servicer, "Writer", lambda context, **_: Writer(context, timeout_s=60))
        assert text_of(await collect(stack.stub.Generate(generate()))) == "hello"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [response async for response in session]
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
