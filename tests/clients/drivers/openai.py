"""OpenAI's own client for Python."""

import json

import openai
from pydantic import BaseModel, ConfigDict, Field

from tests.clients.trial import Report, check, served, serving

MESSAGES = [{"role": "user", "content": "What is 3 + 4?"}]
WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]
SCHEMA = {
    "type": "object",
    "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "forecast", "parameters": SCHEMA}}


class Person(BaseModel):
    """A person."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=150)


class Weather(BaseModel):
    """Get the weather in a city."""

    model_config = ConfigDict(extra="forbid")
    city: str = Field(max_length=12)


def main() -> None:
    report = Report("openai")
    url, model = served()
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    try_endpoints(report, client, model)
    try_helpers(report, client, model)
    try_embeddings(report, model)
    report.print()


def try_embeddings(report: Report, model: str) -> None:
    """Tries embeddings, which the client asks for in base64 by default."""
    create = openai.OpenAI(
        base_url=f"{serving('embed')}/v1", api_key="none", max_retries=0
    ).embeddings.create
    with report.trial("embeddings of texts and of token ids"):
        texts = create(model=model, input=["hello", "What is 3 + 4?"])
        check([each.index for each in texts.data] == [0, 1], texts)
        check(create(model=model, input=[[5, 6, 7], [8, 9]]).usage.prompt_tokens == 5, "tokens")
    with report.trial("embeddings as numbers, and their first elements"):
        first = texts.data[0].embedding
        [vector] = create(model=model, input="hello", encoding_format="float").data
        near = [abs(a - b) < 1e-5 for a, b in zip(vector.embedding, first, strict=True)]
        check(all(near), vector)
        [short] = create(model=model, input="hello", dimensions=8).data
        check(len(short.embedding) == 8, short)


def try_helpers(report: Report, client: openai.OpenAI, model: str) -> None:
    """Tries the helpers that read streams and objects of pydantic."""
    tool = openai.pydantic_function_tool(Weather, name="get_weather")
    wish = {"model": model, "messages": WEATHER, "max_tokens": 200}
    with report.trial("chat.completions.stream and parse: tools"):
        with client.chat.completions.stream(**wish, tools=[tool]) as stream:
            done = [each for each in stream if each.type == "tool_calls.function.arguments.done"]
        check([each.name for each in done] == ["get_weather"], done)
        answer = client.chat.completions.parse(**wish, tools=[tool])
        [call] = answer.choices[0].message.tool_calls
        check(call.function.parsed_arguments == Weather(city="Paris"), answer)
    with report.trial("chat.completions.stream and parse: a class as the form"):
        answer = client.chat.completions.parse(**wish, response_format=Person)
        check(isinstance(answer.choices[0].message.parsed, Person), answer)
        with client.chat.completions.stream(**wish, response_format=Person) as stream:
            final = stream.get_final_completion()
        check(isinstance(final.choices[0].message.parsed, Person), final)
    wish = {"model": model, "input": WEATHER, "max_output_tokens": 200}
    with report.trial("responses.create, retrieve, delete, and a second turn"):
        first = client.responses.create(model=model, input="hello")
        check(client.responses.retrieve(first.id).output_text == first.output_text, first)
        more = client.responses.create(
            model=model, input="What is 3 + 4?", previous_response_id=first.id
        )
        check(more.output_text, more)
        client.responses.delete(first.id)
    with report.trial("responses.stream and parse: tools"):
        flat = {"type": "function", **tool["function"]}
        with client.responses.stream(**wish, tools=[flat]) as stream:
            final = stream.get_final_response()
        check(json.loads(final.output[0].arguments) == {"city": "Paris"}, final)
        check(client.responses.parse(**wish, tools=[flat]).output[0].name == "get_weather", 0)
    with report.trial("responses.stream and parse: a class as the form"):
        answer = client.responses.parse(**wish, text_format=Person)
        check(isinstance(answer.output_parsed, Person), answer)
        with client.responses.stream(**wish, text_format=Person) as stream:
            final = stream.get_final_response()
        check(isinstance(final.output_parsed, Person), final)


def try_endpoints(report: Report, client: openai.OpenAI, model: str) -> None:
    """Tries each endpoint."""
    chat = client.chat.completions
    with report.trial("models: list, retrieve"):
        check([each.id for each in client.models.list()] == [model], "another list")
        check(client.models.retrieve(model).id == model, "another model")
    with report.trial("chat"):
        answer = chat.create(model=model, messages=MESSAGES, max_tokens=16, user="me", store=False)
        check(answer.choices[0].message.content and answer.usage.total_tokens, answer)
    with report.trial("chat, streamed with usage"):
        chunks = list(
            chat.create(
                model=model,
                messages=MESSAGES,
                max_tokens=16,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        check(chunks[-1].usage.completion_tokens, chunks[-1])
    with report.trial("developer role and names"):
        named = [{"role": "developer", "content": "Be short.", "name": "me"}, *MESSAGES]
        check(chat.create(model=model, messages=named, max_tokens=4).choices, "no choices")
    with report.trial("JSON schema"):
        form = {"type": "json_schema", "json_schema": {"name": "f", "schema": SCHEMA}}
        answer = chat.create(model=model, messages=MESSAGES, response_format=form, max_tokens=64)
        check(json.loads(answer.choices[0].message.content)["days"], answer)
    with report.trial("a required tool, whole and streamed"):
        wish = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 128, "seed": 1}
        answer = chat.create(model=model, messages=MESSAGES, **wish)
        [call, *_] = answer.choices[0].message.tool_calls
        check(json.loads(call.function.arguments)["days"], answer)
        with chat.stream(model=model, messages=MESSAGES, **wish) as stream:
            final = stream.get_final_completion()
        check(final.choices[0].message.tool_calls[0].function.name == "forecast", final)
    with report.trial("an effort of reasoning that is none"):
        answer = chat.create(model=model, messages=MESSAGES, reasoning_effort="none")
        check(answer.choices[0].message.content, answer)
    with report.trial("completions of lists of texts and token ids"):
        for prompt in (["1 + 2 =", "3 + 4 ="], [[5, 6, 7], [8, 9]]):
            answer = client.completions.create(model=model, prompt=prompt, max_tokens=4, n=2)
            check([each.index for each in answer.choices] == [0, 1, 2, 3], answer)
    with report.trial("echo with max_tokens of 0"):
        answer = client.completions.create(
            model=model, prompt="1 + 2", max_tokens=0, echo=True, logprobs=1
        )
        check(answer.choices[0].text == "1 + 2", answer)
        check(len(answer.choices[0].logprobs.tokens) == answer.usage.prompt_tokens, answer)
    with report.trial("a wrong field is a BadRequestError with its name"):
        try:
            chat.create(model=model, messages=MESSAGES, extra_body={"wish": 1})
        except openai.BadRequestError as error:
            check(error.param == "wish", error)


if __name__ == "__main__":
    main()
