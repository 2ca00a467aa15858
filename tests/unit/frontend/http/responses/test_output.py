"""Output items from outputs that hold several things at once."""

import json

from services.frontend.engine_client.messages import STOP, FinishReason
from services.frontend.http.fields.parse import parse_body
from services.frontend.http.responses.items import messages_of, messages_of_output
from services.frontend.http.responses.output import OutputItems
from services.frontend.http.responses.schema import ResponsesRequest
from services.frontend.pipeline.request import Output
from services.frontend.reply.deltas import CallPiece


def output(text="", reasoning="", calls=(), *, num_tokens=1, end=None):
    return Output(
        request_id="r", text=text, reasoning=reasoning, calls=calls, finish_reason=end,
        token_ids=[5] * num_tokens, logprobs=[], prompt_logprobs=[], usage=None, stop_token_id=None,
    )  # fmt: skip


def test_all_in_one_output_is_reasoning_then_text_then_calls():
    items = OutputItems(None)
    calls = [CallPiece(0, "c0", "f", "{}"), CallPiece(1, "c1", "g", '{"a"')]
    events = items.push(output("text", "thought", calls))
    events += items.push(output(calls=[CallPiece(1, arguments=":1}")], end=STOP))
    shown = items.snapshot()
    assert [item["type"] for item in shown] == [
        "reasoning", "message", "function_call", "function_call",
    ]  # fmt: skip
    assert [item["arguments"] for item in shown[2:]] == ["{}", '{"a":1}']
    assert [e["output_index"] for e in events] == sorted(e["output_index"] for e in events)


def test_arguments_of_an_open_call_come_before_text_of_the_same_output():
    items = OutputItems(None)
    items.push(output(calls=[CallPiece(0, "c0", "f", "{")]))
    items.push(output("after", calls=[CallPiece(0, arguments="}")], end=STOP))
    call, message = items.snapshot()
    assert call["arguments"] == "{}"
    assert message["content"][0]["text"] == "after"


def test_an_item_that_is_not_done_is_incomplete():
    items = OutputItems(None)
    items.push(output("half"))
    assert items.snapshot()[0]["status"] == "incomplete"
    items.push(output(end=FinishReason.FINISH_REASON_LENGTH))
    assert items.snapshot()[0]["status"] == "incomplete"


def messages(*items):
    body = {"model": "m", "input": list(items)}
    return messages_of(parse_body(ResponsesRequest, json.dumps(body).encode()).input)


REASONING = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "3"}


def test_items_of_one_turn_of_the_model_are_one_message():
    answer = {"role": "assistant", "content": "I call."}
    [turn, result] = messages(REASONING, answer, CALL, RESULT)
    assert (turn["reasoning_content"], turn["content"]) == ("Hm.", "I call.")
    assert [call["id"] for call in turn["tool_calls"]] == ["c"]
    assert (result["role"], result["tool_call_id"], result["content"]) == ("tool", "c", "3")


def test_reasoning_or_text_after_a_call_begins_another_message():
    answer = {"role": "assistant", "content": "Done."}
    assert [("tool_calls" in m, m["content"]) for m in messages(CALL, answer)] == [
        (True, None),
        (False, "Done."),
    ]
    assert len(messages(CALL, REASONING, CALL)) == 2
    assert len(messages(answer, {"role": "user", "content": "x"}, answer)) == 3


def test_a_summary_stands_for_reasoning_that_is_not_there():
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Short."}]}
    assert messages(summary)[0]["reasoning_content"] == "Short."


def test_parts_are_joined_and_a_refusal_is_text():
    parts = [{"type": "output_text", "text": "a"}, {"type": "refusal", "refusal": "b"}]
    assert messages({"role": "assistant", "content": parts})[0]["content"] == "ab"


def test_a_call_with_arguments_that_are_no_object_is_stored_with_their_text():
    output = [{**CALL, "arguments": '{"a":'}, CALL]
    [turn] = messages_of_output(json.dumps(output).encode())
    damaged, whole = (call["function"]["arguments"] for call in turn["tool_calls"])
    assert (json.loads(damaged), whole) == ({"INVALID_JSON": '{"a":'}, "{}")
