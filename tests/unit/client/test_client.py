"""The Python client against a frontend that echoes."""

import asyncio

import pytest

from services.client import errors
from services.client.client import OctavoClient
from services.client.requests import Message, Options, Sampling
from services.client.responses import FinishReason, TokenLogprob, Usage
from services.client.vectors import VectorOptions
from tests.support.fake_frontend import FakeFrontend
from tests.support.processes import free_port


@pytest.fixture
async def fake():
    async with FakeFrontend() as frontend:
        yield frontend


@pytest.fixture
async def client(fake):
    async with OctavoClient(fake.address) as connected:
        yield connected


async def test_text_arrives_in_chunks_and_the_last_one_has_reason_and_usage(client):
    chunks = [chunk async for chunk in client.generate("one two three")]
    assert [chunk.text for chunk in chunks] == ["one", " two", " three", ""]
    assert [chunk.finish_reason for chunk in chunks] == [None, None, None, FinishReason.STOP]
    assert chunks[-1].usage == Usage(prompt_tokens=3, cached_tokens=1, output_tokens=3)
    assert chunks[-1].stop_token_id == 2


async def test_completion_gathers_the_whole_answer(client):
    completion = await client.generate("one two three").completion()
    assert completion.text == "one two three"
    assert completion.token_ids == [3, 3, 5]
    assert completion.finish_reason is FinishReason.STOP


async def test_a_prompt_may_be_token_ids(client):
    assert (await client.generate([3, 1]).completion()).text == "xxx x"


async def test_a_chat_carries_the_whole_conversation(client, fake):
    turns = [("system", "be kind"), ("user", "hello there")]
    stream = client.chat([Message(role=role, content=content) for role, content in turns])
    assert (await stream.completion()).text == "hello there"
    assert fake.conversations == [turns]


async def test_only_the_sampling_fields_that_are_set_travel(client, fake):
    sampling = Sampling(temperature=0, stop_token_ids=[7], logit_bias={5: -1.5})
    await client.generate("a", Options(sampling=sampling, stop=["END"], priority=3)).completion()
    sent = fake.options[0]
    assert {field.name for field, _ in sent.sampling.ListFields()} == {
        "temperature",
        "stop_token_ids",
        "logit_bias",
    }
    assert sent.sampling.temperature == 0
    assert list(sent.stop) == ["END"]
    assert sent.priority == 3
    assert not sent.HasField("show_special_tokens")


async def test_logprobs_come_back_typed(client):
    completion = await client.generate("word", Options(sampling=Sampling(logprobs=1))).completion()
    assert completion.logprobs[0].chosen == TokenLogprob(token_id=4, logprob=-0.5)
    assert completion.logprobs[0].top == (TokenLogprob(token_id=4, logprob=-0.5),)


async def test_the_time_limit_travels_as_the_calls_deadline(client, fake):
    await client.generate("a", timeout_s=10_000).completion()
    await client.generate("a").completion()
    assert fake.time_limits_s == [pytest.approx(10_000, abs=1000), None]


async def test_a_refusal_is_raised_as_its_own_class_with_the_servers_advice(client):
    with pytest.raises(errors.OverloadedError, match="the queue is full") as caught:
        await client.generate("FAIL").completion()
    assert caught.value.code == "RESOURCE_EXHAUSTED"
    assert caught.value.retry_after_s == 0.25


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (1, errors.CancelledError),
        (3, errors.InvalidRequestError),
        (4, errors.DeadlineExceededError),
        (5, errors.NotFoundError),
        (6, errors.DuplicateRequestError),
        (7, errors.NotPermittedError),
        (8, errors.OverloadedError),
        (12, errors.UnsupportedError),
        (13, errors.InternalError),
        (14, errors.UnavailableError),
        (99, errors.InternalError),
    ],
)
def test_every_status_has_its_class(code, expected):
    assert type(errors.error_of(code, "why")) is expected


async def test_a_passed_time_limit_is_raised(client):
    with pytest.raises(errors.DeadlineExceededError):
        await client.generate("HANG on", timeout_s=0.2).completion()


async def test_a_service_that_is_away_is_unavailable():
    async with OctavoClient(f"127.0.0.1:{free_port()}") as client:
        with pytest.raises(errors.UnavailableError):
            await client.list_models()


async def test_a_stream_that_ends_without_a_finish_reason_is_an_error(client):
    with pytest.raises(errors.InternalError, match="without a finish reason"):
        await client.generate("CUT off").completion()


async def test_cancel_reaches_the_server_and_the_reader_learns_of_it(client, fake):
    stream = client.generate("HANG on")
    assert (await anext(stream)).text == "HANG"
    stream.cancel()
    with pytest.raises(errors.CancelledError):
        await anext(stream)
    await asyncio.wait_for(fake.was_cancelled.wait(), 60)


async def test_leaving_a_streams_block_cancels_the_request(client, fake):
    async with client.generate("HANG on") as stream:
        await anext(stream)
    await asyncio.wait_for(fake.was_cancelled.wait(), 60)


async def test_a_cancelled_reader_is_cancelled_without_an_error(client, fake):
    stream = client.generate("HANG on")
    await anext(stream)
    reader = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    await asyncio.wait_for(fake.was_cancelled.wait(), 60)


async def test_vectors_are_in_the_order_of_texts_and_tokens(client, fake):
    found = await client.embed(
        ["one two", [5, 6, 7]], VectorOptions(model="m", priority=2), timeout_s=10_000
    )
    assert found.vectors == [(2, -0.5), (3, -0.5)]
    assert found.usage == Usage(prompt_tokens=5, cached_tokens=0, output_tokens=0)
    [sent] = fake.vector_requests
    assert (sent.options.model, sent.options.priority) == ("m", 2)
    assert not sent.options.HasField("truncate_tokens")
    assert not sent.HasField("prompt_name")
    assert fake.time_limits_s == [pytest.approx(10_000, abs=1000)]


async def test_scores_are_in_the_order_of_documents(client, fake):
    one = await client.score("q", ["a b", "c"])
    several = await client.score(["q", "r"], ["a b", "c"], instruction="i")
    assert one.scores == several.scores == [2, 1]
    assert [list(each.queries) for each in fake.vector_requests] == [["q"], ["q", "r"]]


async def test_vectors_with_values_that_no_field_holds_are_refused(client):
    for call in (
        lambda: client.embed([[-1]]),
        lambda: client.embed(["a"], dimensions=-1),
        lambda: client.embed(["a"], VectorOptions(truncate_tokens=2**32)),
    ):
        with pytest.raises(errors.InvalidRequestError):
            await call()


async def test_tokenize_pairs_ids_with_their_text(client):
    tokens = await client.tokenize("one three")
    assert [(token.id, token.text) for token in tokens] == [(3, "one"), (5, " three")]


async def test_tokenize_takes_a_conversation(client):
    tokens = await client.tokenize([Message(role="user", content="hi")])
    assert [token.text for token in tokens] == ["user", " hi"]


async def test_detokenize_returns_text(client):
    assert await client.detokenize([2, 1]) == "xx x"


async def test_models_come_with_limits_and_default_sampling(client):
    (card,) = await client.list_models()
    assert (card.name, card.max_model_len, card.ready) == ("echo", 64, True)
    assert card.default_sampling == {"temperature": 0.5, "top_k": 20}
