"""The arguments that a demanded call may have."""

import json

from tests.support.responses import running

PATH = "/v1/chat/completions"
BODY = {"model": "fake", "messages": [{"role": "user", "content": "?"}]}


async def test_a_demanded_call_of_a_function_without_parameters_has_no_arguments():
    def function(**parameters):
        return {"type": "function", "function": {"name": "now", **parameters}}

    none = [
        {},
        {"type": "object"},
        {"type": "object", "properties": {}, "required": []},
        {"$ref": "#/$defs/E", "$defs": {"E": {"type": "object", "properties": {}}}},
        {"allOf": [{"type": "object"}, {"title": "Nothing"}]},
    ]
    free = [
        {"type": "object", "properties": {"a": {}}},
        {"additionalProperties": True},
        {"type": "object", "additionalProperties": {"type": "string"}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"a": {}}}}},
        {"allOf": [{"type": "object"}, {"required": ["a"]}]},
    ]
    async with running() as (engine, _, client):

        async def schema_of(tool, **changes):
            changes = {"tool_choice": "required", **changes}
            answer = await client.post(PATH, json={**BODY, "tools": [tool], **changes})
            assert answer.status_code == 200, answer.text
            return json.loads(
                engine.submits[-1].sampling.structured_output.tagged.tags[0].json_schema
            )

        for tool in (function(), *(function(parameters=each) for each in (None, *none))):
            assert (await schema_of(tool))["additionalProperties"] is False
        for parameters in free:
            tool = function(parameters=parameters)
            assert await schema_of(tool) == {"type": "object", **parameters}
        assert await schema_of(function(), tool_choice="auto", parallel_tool_calls=False) == {
            "type": "object"
        }
        strict = {"type": "function", "function": {"name": "now", "strict": True}}
        assert (await schema_of(strict, tool_choice="auto"))["additionalProperties"] is False
