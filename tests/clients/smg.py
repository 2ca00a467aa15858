"""Trials of the smg gateway in front of the engine, driven by the openai client."""

import importlib.metadata
import json

import openai

from tests.clients.trial import Report, check
from tests.support.smg_gateway import smg_gateway

WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def try_gateway(report: Report, engine_address: str, model: str) -> None:
    """Starts a gateway and tries it; a gateway guesses a model's calls from its name or a flag."""
    report.version = importlib.metadata.version("smg")
    with (
        smg_gateway(engine_address, model, "--tool-call-parser", "qwen") as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        _try_tools(report, client, model)


def _try_tools(report: Report, client: openai.OpenAI, model: str) -> None:
    create = client.chat.completions.create
    wish = {"model": model, "messages": WEATHER, "tools": [TOOL], "max_tokens": 128}
    with report.trial("chat"):
        answer = create(model=model, messages=WEATHER, max_tokens=64)
        check(answer.choices[0].message.content, answer)
    choices = {
        "auto": {},
        "required, one call": {"tool_choice": "required", "parallel_tool_calls": False},
        "named": {"tool_choice": NAMED},
    }
    for name, choice in choices.items():
        with report.trial(f"tools: {name}, whole and streamed"):
            _check_call(create(**wish, **choice).choices[0].message.tool_calls)
            with client.chat.completions.stream(**wish, **choice) as stream:
                final = stream.get_final_completion()
            _check_call(final.choices[0].message.tool_calls)
    with report.trial("tools: none"):
        answer = create(**wish, tool_choice="none")
        check(not answer.choices[0].message.tool_calls, answer)
    with report.trial("the result of a tool sent back"):
        call = create(**wish).choices[0].message
        result = {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "sunny"}
        turns = [*WEATHER, call.model_dump(exclude_none=True), result]
        answer = create(**wish | {"messages": turns})
        check("sunny" in answer.choices[0].message.content, answer)


def _check_call(calls):
    [call] = calls
    check(call.function.name == "get_weather", call)
    check(json.loads(call.function.arguments) == {"city": "Paris"}, call)
