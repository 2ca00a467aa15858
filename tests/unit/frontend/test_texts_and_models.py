"""Tokenize, Detokenize and ListModels."""

import grpc
import pytest

from protos.frontend.v1 import frontend_pb2 as pb
from tests.support.byte_tokenizer import reference_tokenizer
from tests.support.child_processes import children_that_run
from tests.support.fake_engine import FakeEngine
from tests.support.frontend_stack import frontend_stack

TOO_MANY_TOKENS = pb.DetokenizeRequest(token_ids=[5] * (2**20 + 1))


@pytest.fixture
async def stub():
    async with FakeEngine() as engine, frontend_stack(engine) as stack:
        yield stack.stub


async def test_text_comes_back_from_its_tokens(stub):
    text = "hello \N{SNOWMAN} world"
    tokenized = await stub.Tokenize(pb.TokenizeRequest(text=text))
    assert list(tokenized.token_ids) == reference_tokenizer().encode(text).ids
    assert len(tokenized.tokens) == len(tokenized.token_ids)
    back = await stub.Detokenize(pb.DetokenizeRequest(token_ids=tokenized.token_ids))
    assert back.text == text


async def test_a_conversation_is_tokenized_as_it_would_be_answered(stub):
    conversation = pb.Conversation(messages=[pb.ChatMessage(role="user", content="hello")])
    tokenized = await stub.Tokenize(pb.TokenizeRequest(conversation=conversation))
    assert "".join(tokenized.tokens) == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_special_tokens_are_shown_on_wish(stub):
    hidden = await stub.Detokenize(pb.DetokenizeRequest(token_ids=[0, 1]))
    shown = await stub.Detokenize(pb.DetokenizeRequest(token_ids=[0, 1], show_special_tokens=True))
    assert hidden.text == ""
    assert shown.text == "<|im_start|><|im_end|>"


@pytest.mark.parametrize(
    ("method", "request_", "code"),
    [
        ("Tokenize", pb.TokenizeRequest(), grpc.StatusCode.INVALID_ARGUMENT),
        ("Tokenize", pb.TokenizeRequest(text="x", model="no"), grpc.StatusCode.NOT_FOUND),
        ("Detokenize", pb.DetokenizeRequest(token_ids=[512]), grpc.StatusCode.INVALID_ARGUMENT),
        (
            "Detokenize",
            pb.DetokenizeRequest(token_ids=[5] * (2**20 + 1)),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        ("Detokenize", pb.DetokenizeRequest(model="no"), grpc.StatusCode.NOT_FOUND),
    ],
)
async def test_what_cannot_be_done_is_refused(stub, method, request_, code):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await getattr(stub, method)(request_)
    assert caught.value.code() == code


async def test_the_model_is_listed_with_its_limits(stub):
    [model] = (await stub.ListModels(pb.ListModelsRequest())).models
    assert (model.name, model.architecture) == ("fake", "FakeForCausalLM")
    assert (model.max_model_len, model.ready) == (512, True)
    assert model.default_sampling.temperature == 0.5


async def test_nothing_is_listed_before_the_engine_was_there():
    engine = FakeEngine()
    await engine.start()
    await engine.die()
    async with frontend_stack(engine, wait_ready=False) as stack:
        assert not (await stack.stub.ListModels(pb.ListModelsRequest())).models
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.stub.Tokenize(pb.TokenizeRequest(text="x"))
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_engines_that_come_at_the_same_time_share_one_template():
    async with (
        FakeEngine(engine_id="a") as first,
        FakeEngine(engine_id="b") as second,
        frontend_stack(first, second, forks_helpers=False),
    ):
        assert len(children_that_run("services.frontend.text.template_worker")) == 1
