"""Structured output of real services: the client, the command line and the openai client."""

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

import jsonschema
import openai
import pytest

from services.client.client import OctavoClient
from services.client.errors import InvalidRequestError
from services.client.requests import Message, Options, Sampling
from services.client.responses import FinishReason
from services.client.structured_output import StructuredOutput
from tests.support.forked_program import run_octavo
from tests.support.processes import Stack, free_port, stack

SCHEMA = {
    "type": "object",
    "properties": {
        "answer": {"type": "integer", "minimum": -99, "maximum": 99},
        "sure": {"type": "boolean"},
        "words": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 2},
    },
    "required": ["answer", "sure", "words"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "What is 3 + 4?"}]


@dataclass
class Served:
    services: Stack
    url: str


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    port = free_port()
    flags = {"num_kv_blocks": 24, "max_num_seqs": 8, "grammar_timeout_s": 30}
    with stack(engine=flags, frontend={"http_port": port}) as services:
        yield Served(services, f"http://127.0.0.1:{port}/v1")


@pytest.fixture
async def client(served):
    async with OctavoClient(served.services.frontend.address) as connected:
        yield connected


def options(seed=0, *, temperature=1.0, max_tokens=150, logprobs=None, **wanted):
    return Options(
        sampling=Sampling(
            seed=seed,
            temperature=temperature,
            max_tokens=max_tokens,
            logprobs=logprobs,
            repetition_penalty=1.1,
            structured_output=StructuredOutput(**wanted) if wanted else None,
        )
    )


async def test_outputs_follow_their_grammars_through_preemptions_and_repeat_exactly(client):
    """24 blocks of 16 tokens are too few for these requests together.

    Random draws may change with the last bit of a logit, and so with the batch.
    """
    wanted = [
        {"json_schema": json.dumps(SCHEMA)},
        {"regex": "[a-z]{30,60}"},
        {"lark": 'start: "(" start ")" | /[0-9]{1,9}/'},
        {"choice": ("red", "green", "deep blue")},
        {},
    ] * 2
    prompts = [f"Number {i}: " + "once upon a time " * 4 for i in range(len(wanted))]

    async def run(i, temperature):
        wishes = options(i, temperature=temperature, max_tokens=120, **wanted[i])
        return await client.generate(prompts[i], wishes).completion()

    async def run_together(temperature):
        return await asyncio.gather(*(run(i, temperature) for i in range(len(wanted))))

    greedy = await run_together(0.0)
    alone = [await run(i, 0.0) for i in range(len(wanted))]
    assert [each.text for each in greedy] == [each.text for each in alone]
    drawn = await run_together(1.0)
    for form, each in zip(wanted * 2, greedy + drawn, strict=True):
        if each.finish_reason is FinishReason.LENGTH:
            continue
        if "json_schema" in form:
            jsonschema.validate(json.loads(each.text), SCHEMA)
        elif "regex" in form:
            assert re.fullmatch(form["regex"], each.text)
        elif "lark" in form:
            assert re.fullmatch(r"\(*[0-9]{1,9}\)*", each.text)
            assert each.text.count("(") == each.text.count(")")
        elif "choice" in form:
            assert each.text in form["choice"]


async def test_greedy_output_follows_its_grammar_beside_log_probabilities(client):
    answer = await client.chat(
        [Message(role="user", content="What is 3 + 4?")],
        options(temperature=0, logprobs=2, regex="[0-9]{5}"),
    ).completion()
    assert re.fullmatch("[0-9]{5}", answer.text)
    assert len(answer.logprobs) == len(answer.token_ids)
    # They are the model's own, which a grammar does not change.
    assert any(p.chosen.token_id != p.top[0].token_id for p in answer.logprobs)


async def test_min_tokens_that_excludes_all_that_a_grammar_allows_is_the_callers_error(client):
    async with asyncio.timeout(30):
        tokens = await client.tokenize("abab")
        sampling = Sampling(
            min_tokens=3,
            max_tokens=9,
            stop_token_ids=[token.id for token in tokens],
            structured_output=StructuredOutput(regex="a[ab]{5}"),
        )
        with pytest.raises(InvalidRequestError, match="min_tokens is 3, but after 0 tokens"):
            async for _ in client.generate("x", Options(sampling=sampling)):
                pass


async def test_a_request_without_a_grammar_is_as_if_no_request_had_one(client):
    plain = options(temperature=0, max_tokens=40)
    alone = await client.generate("Once upon", plain).completion()
    beside, _ = await asyncio.gather(
        client.generate("Once upon", plain).completion(),
        client.generate("x", options(1, regex="[a-z]{40}")).completion(),
    )
    assert beside.token_ids == alone.token_ids


async def test_the_openai_client_gets_what_its_schema_says(served):
    async with openai.AsyncOpenAI(base_url=served.url, api_key="none", max_retries=0) as client:
        wish = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 150}
        answer = await client.chat.completions.create(
            **wish,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "sum", "schema": SCHEMA, "strict": True},
            },
        )
        jsonschema.validate(json.loads(answer.choices[0].message.content), SCHEMA)
        stream = await client.completions.create(
            model="tiny",
            prompt="Once",
            stream=True,
            extra_body={"structured_outputs": {"regex": "[0-9]{3}"}},
        )
        text = "".join([chunk.choices[0].text async for chunk in stream])
        assert re.fullmatch("[0-9]{3}", text)
        with pytest.raises(openai.BadRequestError, match="refused"):
            await client.chat.completions.create(
                **wish, stream=True, extra_body={"structured_outputs": {"grammar": "nothing"}}
            )


async def test_a_begun_document_is_finished(served):
    form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}}
    async with openai.AsyncOpenAI(base_url=served.url, api_key="none", max_retries=0) as client:

        async def finish(begun):
            last = {"role": "assistant", "content": begun}
            answer = await client.chat.completions.create(
                model="tiny",
                messages=[*MESSAGES, last],
                response_format=form,
                max_tokens=150,
                temperature=0,
                extra_body={"continue_final_message": True},
            )
            return answer.choices[0].message.content

        begun = '{"answer": -7, "sure": t'
        document = json.loads(begun + await finish(begun))
        jsonschema.validate(document, SCHEMA)
        assert document["answer"] == -7
        for wrong in ("Here it is: ", '{"sure": true', json.dumps(document)):
            with pytest.raises(openai.BadRequestError, match=r"structured_output\.begun"):
                await finish(wrong)


@pytest.mark.parametrize("text", ["a <|im_end|> b", "<|im_start|>system", "<|endoftext|>"])
async def test_text_that_is_spelled_like_a_special_token_arrives_whole(client, served, text):
    answer = await client.generate("x", options(choice=(text,))).completion()
    assert answer.text == text
    async with openai.AsyncOpenAI(base_url=served.url, api_key="none", max_retries=0) as http:
        schema = {"type": "object", "properties": {text: {"enum": [text]}}, "required": [text],
                  "additionalProperties": False}  # fmt: skip
        said = await http.completions.create(
            model="tiny", prompt="x", max_tokens=150, temperature=0,
            extra_body={"structured_outputs": {"json": schema}},
        )  # fmt: skip
    assert json.loads(said.choices[0].text) == {text: text}


async def test_schemas_nest_equally_deep_in_grpc_and_http(client, served):
    def nested(depth):
        return '{"items":' * (depth - 1) + '{"type":"null"}' + "}" * (depth - 1)

    async with openai.AsyncOpenAI(base_url=served.url, api_key="none", max_retries=0) as http:
        for depth, is_taken in ((120, True), (121, False)):
            by_grpc = client.generate("x", options(max_tokens=1, json_schema=nested(depth)))
            by_http = http.completions.create(
                model="tiny", prompt="x", max_tokens=1,
                extra_body={"structured_outputs": {"json": json.loads(nested(depth))}},
            )  # fmt: skip
            if is_taken:
                assert (await by_grpc.completion()).token_ids
                assert (await by_http).choices
                continue
            with pytest.raises(InvalidRequestError, match="121 levels deep; the limit is 120"):
                await by_grpc.completion()
            with pytest.raises(openai.BadRequestError, match="121 levels deep; the limit is 120"):
                await by_http


def test_the_command_line_takes_files_and_expressions(served, tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(SCHEMA))
    at = ("--frontend", served.services.frontend.address, "--temperature", "0")
    run = run_octavo("generate", "Once", "--json-schema", str(schema), "--max-tokens", "200", *at)
    assert run.returncode == 0, run.stderr
    jsonschema.validate(json.loads(run.stdout), SCHEMA)
    run = run_octavo("chat", "Hi", "--choice", "yes", "--choice", "no", *at)
    assert run.stdout.strip() in ("yes", "no")
    run = run_octavo("generate", "Once", "--regex", "a", "--json-object", *at)
    assert run.returncode == 2
    assert "exactly one form" in " ".join(run.stderr.replace("│", " ").split())


async def refusal_of_hostile(client):
    """Asks for output that follows a grammar which takes minutes to compile."""
    hostile = json.dumps({"type": "integer", "multipleOf": 99999989})
    with pytest.raises(InvalidRequestError, match="compiling it took"):
        await client.generate("x", options(json_schema=hostile)).completion()


async def test_hostile_grammars_cost_their_time_limit():
    async with (
        stack(engine={"grammar_timeout_s": 1}) as services,
        OctavoClient(services.frontend.address) as client,
    ):
        await asyncio.gather(*(refusal_of_hostile(client) for _ in range(3)))
        answer = await client.generate("Once", options(temperature=0, max_tokens=20)).completion()
    assert len(answer.token_ids) == 20


async def test_hostile_grammars_cost_other_requests_nothing(served, client):
    """The last one with `served`: its engine would go on compiling to the time limit."""
    attacks = [asyncio.create_task(refusal_of_hostile(client)) for _ in range(3)]
    answer = await client.generate("Once", options(temperature=0, max_tokens=20)).completion()
    assert len(answer.token_ids) == 20
    assert not any(attack.done() for attack in attacks)
    for attack in attacks:
        attack.cancel()
    await asyncio.gather(*attacks, return_exceptions=True)
    await asyncio.to_thread(served.services.engine.kill)
