"""OpenAI's own client for Python."""

import json

import openai

from tests.clients.trial import Report, check, served

MESSAGES = [{"role": "user", "content": "What is 3 + 4?"}]
SCHEMA = {
    "type": "object",
    "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "forecast", "parameters": SCHEMA}}


def main() -> None:
    report = Report("openai")
    url, model = served()
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
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
    report.print()


if __name__ == "__main__":
    main()
