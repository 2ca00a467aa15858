"""Anthropic's own client for Python."""

import anthropic

from tests.clients.trial import Report, check, served

ASK = [{"role": "user", "content": "What is the weather in Paris?"}]
TOOL = {
    "name": "get_weather",
    "description": "Get the weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}


def main() -> None:
    report = Report("anthropic")
    url, model = served()
    client = anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="none")
    wish = {"model": model, "max_tokens": 64, "messages": ASK}
    with report.trial("messages"):
        message = client.messages.create(**wish, system="Be short.")
        check(message.content[0].text and message.usage.output_tokens, message)
        check(message.stop_reason == "end_turn", message)
    with report.trial("messages, streamed"):
        with client.messages.stream(**wish) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        check(text and final.content[0].text == text, final)
        check(
            any(
                each.type == "message_stop" for each in client.messages.create(**wish, stream=True)
            ),
            0,
        )
    with report.trial("tools, and their results sent back"):
        message = client.messages.create(**wish, tools=[TOOL])
        [use] = message.content
        check(message.stop_reason == "tool_use" and use.name == "get_weather", message)
        check(use.input == {"city": "Paris"}, use)
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
        turns = [
            *ASK,
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": [result]},
        ]
        last = client.messages.create(**wish | {"messages": turns}, tools=[TOOL])
        check("sunny" in last.content[0].text, last)
    with report.trial("tools, streamed"):
        with client.messages.stream(**wish, tools=[TOOL]) as stream:
            parts = [each.partial_json for each in stream if each.type == "input_json"]
            final = stream.get_final_message()
        check(final.content[0].input == {"city": "Paris"}, final)
        check("".join(parts) == '{"city": "Paris"}', parts)
    try_options(report, client, model)
    report.print()


def try_options(report: Report, client: anthropic.Anthropic, model: str) -> None:
    """Tries what else a request may ask for, and the other endpoints."""
    wish = {"model": model, "max_tokens": 64, "messages": ASK}
    with report.trial("a tool that must be called"):
        choice = {"type": "tool", "name": "get_weather"}
        ask = [{"role": "user", "content": "hello"}]
        message = client.messages.create(
            **wish | {"messages": ask, "max_tokens": 200}, tools=[TOOL], tool_choice=choice
        )
        check(message.content[0].name == "get_weather", message)
    with report.trial("thinking that is disabled"):
        message = client.messages.create(**wish, thinking={"type": "disabled"})
        check(message.content[0].type == "text", message)
    with report.trial("count_tokens"):
        count = client.messages.count_tokens(model=model, messages=ASK, tools=[TOOL])
        told = client.messages.create(**wish, tools=[TOOL]).usage
        check(count.input_tokens == told.input_tokens + told.cache_read_input_tokens, (count, told))
    with report.trial("models: list, retrieve"):
        check([each.id for each in client.models.list()] == [model], "another list")
        check(client.models.retrieve(model).id == model, "another model")
    with report.trial("a wrong field is a BadRequestError with its name"):
        try:
            client.messages.create(**wish, extra_body={"wish": 1})
        except anthropic.BadRequestError as error:
            check("wish" in str(error), error)
        else:
            check(False, "no error")


if __name__ == "__main__":
    main()
