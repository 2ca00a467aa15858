"""Trials of the cases that Open Responses lists for servers, and of its rules for streams.

Source: the names and aims of the cases at openresponses.org/compliance; requests and checks are
ours. Images are not served, so that case is a refusal by name.
"""

import json
from typing import Any

import httpx
import jsonschema

from tests.clients.trial import Report, check

EVENTS_OF_A_CALL = (
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
)
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "Name of a city"}},
        "required": ["city"],
    },
}


class Server:
    """A server whose answers must have the forms that its OpenAPI document describes."""

    def __init__(self, client: httpx.Client, model: str) -> None:
        """Reads the document of the server that the client is connected to."""
        self._client = client
        self._model = model
        document = self._client.get("/openapi.json").json()
        self._schemas = document["components"]["schemas"]

    def respond(self, *items: dict[str, Any], **fields: Any) -> dict[str, Any]:
        """Returns a whole response to messages.

        Raises:
            ValueError: the request is refused.
            jsonschema.ValidationError: the response has another form.
        """
        answer = self._post(items, fields)
        check(answer.status_code == httpx.codes.OK, answer.text)
        self._check_form("Response", answer.json())
        return answer.json()

    def stream(self, *items: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
        """Returns the events of a streamed response; each raises what `respond` does."""
        answer = self._post(items, {**fields, "stream": True})
        check(answer.headers["content-type"].startswith("text/event-stream"), answer.text)
        *blocks, last = answer.text.strip().split("\n\n")
        check(last == "data: [DONE]", last)
        events = []
        for number, block in enumerate(blocks):
            name, data = block.split("\n")
            event = json.loads(data.removeprefix("data: "))
            check(name == f"event: {event['type']}", name)
            check(event["sequence_number"] == number, event)
            self._check_form("ResponseEvent", event)
            events.append(event)
        return events

    def refuse(self, *items: dict[str, Any]) -> str:
        """Returns the message of a refusal."""
        answer = self._post(items, {})
        check(answer.status_code == httpx.codes.BAD_REQUEST, answer.text)
        return answer.json()["error"]["message"]

    def _post(self, items: tuple[dict[str, Any], ...], fields: dict[str, Any]) -> httpx.Response:
        body = {"model": self._model, "input": list(items), **fields}
        return self._client.post("/v1/responses", json=body)

    def _check_form(self, name: str, value: Any) -> None:
        schema = {"$ref": f"#/components/schemas/{name}", "components": {"schemas": self._schemas}}
        jsonschema.validate(value, schema)


def message(text: str, role: str = "user") -> dict[str, Any]:
    """Returns a message as an item."""
    return {"type": "message", "role": role, "content": text}


def try_cases(report: Report, url: str, model: str) -> None:
    """Tries every case on the server at a URL without /v1."""
    with httpx.Client(base_url=url, timeout=60) as client:
        _try_cases(report, Server(client, model))


def _try_cases(report: Report, server: Server) -> None:
    with report.trial("basic-response"):
        _check_text(server.respond(message("What is 3 + 4?")))
    with report.trial("streaming-response"):
        _check_stream(server.stream(message("Count from 1 to 5.")))
    with report.trial("system-prompt"):
        _check_text(server.respond(message("Be short.", "system"), message("hello")))
    asked = message("What is the weather in Paris?")
    with report.trial("tool-calling"):
        found = server.respond(asked, tools=[WEATHER])
        _check_call(found)
        call = found["output"][-1]
        result = {
            "type": "function_call_output",
            "call_id": call["call_id"],
            "output": "sunny",
        }
        _check_text(server.respond(asked, call, result, tools=[WEATHER]))
    with report.trial("tool-calling-streaming"):
        events = server.stream(asked, tools=[WEATHER])
        kinds = [event["type"] for event in events]
        check(all(kind in kinds for kind in EVENTS_OF_A_CALL), kinds)
        _check_call(events[-1]["response"])
    with report.trial("image-input: refused by a model that sees none"):
        image = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
        told = server.refuse({"type": "message", "role": "user", "content": [image]})
        check("sees no images" in told, told)
    with report.trial("multi-turn"):
        turns = [message("My name is Ada."), message("Hello Ada!", "assistant")]
        _check_text(server.respond(*turns, message("What is my name?")))
    with report.trial("previous_response_id"):
        first = server.respond(message("hello"))
        second = server.respond(message("What is 3 + 4?"), previous_response_id=first["id"])
        check(second["usage"]["input_tokens"] > first["usage"]["input_tokens"], second)


def _check_text(response: dict[str, Any]) -> None:
    check(response["status"] == "completed", response)
    check(response["output"][-1]["content"][0]["text"], response)


def _check_call(response: dict[str, Any]) -> None:
    check(response["status"] == "completed", response)
    call = response["output"][-1]
    check(call["type"] == "function_call" and json.loads(call["arguments"])["city"], call)


def _check_stream(events: list[dict[str, Any]]) -> None:
    """Raises an exception unless the deltas of each text are the text of the last response."""
    kinds = [event["type"] for event in events]
    check(kinds[:2] == ["response.created", "response.in_progress"], kinds)
    check(kinds[-1] == "response.completed", kinds)
    deltas = [each["delta"] for each in events if each["type"] == "response.output_text.delta"]
    check("".join(deltas) == events[-1]["response"]["output"][-1]["content"][0]["text"], deltas)
    _check_text(events[-1]["response"])
