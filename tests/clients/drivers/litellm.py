"""litellm, which many applications put between themselves and models."""

import asyncio
import json

import litellm

from tests.clients.trial import Report, check, served

MESSAGES = [{"role": "user", "content": "What is 3 + 4?"}]
WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
TOOL = {
    "type": "function",
    "function": {"name": "now", "parameters": {"type": "object", "properties": {}}},
}


def main() -> None:
    report = Report("litellm")
    url, model = served()
    to = {"model": f"hosted_vllm/{model}", "api_base": url, "api_key": "none", "num_retries": 0}
    generic = to | {"model": f"openai/{model}"}
    for name, target in (("openai", generic), ("hosted_vllm", to)):
        with report.trial(f"provider {name}: chat"):
            answer = litellm.completion(
                **target, messages=MESSAGES, max_tokens=16, metadata={"a": "b"}, user="me"
            )
            check(answer.choices[0].message.content, answer)
        with report.trial(f"provider {name}: chat, streamed"):
            chunks = list(litellm.completion(**target, messages=MESSAGES, stream=True))
            check(litellm.stream_chunk_builder(chunks).choices[0].message.content, chunks[-1])
        with report.trial(f"provider {name}: a required tool"):
            answer = litellm.completion(
                **target, messages=MESSAGES, tools=[TOOL], tool_choice="required", max_tokens=128
            )
            check(answer.choices[0].message.tool_calls[0].function.name == "now", answer)
    try_anthropic(report, url.removesuffix("/v1"), model)
    with report.trial("responses"):
        answer = litellm.responses(model=generic["model"], **_place(url), input="What is 3 + 4?")
        check(answer.output[0].content[0].text, answer)
    with report.trial("JSON object"):
        answer = litellm.completion(
            **generic, messages=MESSAGES, response_format={"type": "json_object"}, max_tokens=200
        )
        choice = answer.choices[0]
        check(choice.finish_reason == "length" or json.loads(choice.message.content) is not None, 1)
    with report.trial("text_completion, one prompt and several"):
        text = generic | {"model": f"text-completion-openai/{model}"}
        check(litellm.text_completion(**text, prompt="1 + 2 =", max_tokens=4).choices, "none")
        answer = litellm.text_completion(**text, prompt=["1 + 2 =", "3 + 4 ="], max_tokens=4)
        check(len(answer.choices) == 2, answer)
    report.print()


def try_anthropic(report: Report, url: str, model: str) -> None:
    """Tries the provider that speaks Anthropic's API."""
    to = {"model": f"anthropic/{model}", **_place(url), "num_retries": 0, "max_tokens": 128}
    with report.trial("provider anthropic: chat"):
        answer = litellm.completion(**to, messages=MESSAGES)
        check(answer.choices[0].message.content, answer)
    with report.trial("provider anthropic: a tool, whole and streamed"):
        wish = {"messages": WEATHER, "tools": [WEATHER_TOOL]}
        chunks = list(litellm.completion(**to, **wish, stream=True))
        for answer in (litellm.completion(**to, **wish), litellm.stream_chunk_builder(chunks)):
            [call] = answer.choices[0].message.tool_calls
            check(json.loads(call.function.arguments) == {"city": "Paris"}, answer)
    with report.trial("anthropic.messages"):
        answer = asyncio.run(litellm.anthropic.messages.acreate(**to, messages=MESSAGES))
        check(answer["content"][0]["text"], answer)


def _place(url: str) -> dict[str, str]:
    return {"api_base": url, "api_key": "none"}


if __name__ == "__main__":
    main()
