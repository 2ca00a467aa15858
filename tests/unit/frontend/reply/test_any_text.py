"""Any text in any pieces is read to its end, alike, and into what JSON and protobuf can hold."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.frontend.engine_client.messages import LENGTH, STOP, Usage
from services.frontend.http.messages.answer import Block, MessageAnswer
from services.frontend.http.responses.output import OutputItems
from services.frontend.pipeline.request import Output
from services.frontend.pipeline.tools import tool_call_of
from services.frontend.reply.deltas import ReplyPiece, joined_calls, piece_of
from services.frontend.reply.format_choice import FORMATS
from services.frontend.reply.reply_reader import ReplyReader
from services.frontend.rpc.convert import output_to_proto

TOOLS = {
    "f": {
        "type": "object",
        "properties": {
            "s": {"type": "string"},
            "n": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]},
            "list": {"type": "array"},
        },
        "$defs": {"n": {"type": "integer"}},
    },
    "now": {"type": "object", "properties": {}},
}
JSON_PARTS = [
    '{"name": "f", "arguments": ', '{"name": "now", "parameters": ', '{"arguments": ',
    '"name": "f"', '{"s": "x"}', '{"s": "', "{}", "{", "}", "[", "]", "null", "NaN", "1e999", ", ",
    ": ", '"', "'", r'"\ud83d"', r'"{\"s\": \"\ud83d\"}"', r'"\ud83d\ude00"', r'"\x"', "\\", ";",
    "```json\n", "```",
]  # fmt: skip
NAMES = [
    "f", "now", "s", "n", "list", "functions.now:0", "call:f", "thought", "assistant",
    "to=functions.f",
]  # fmt: skip
PYTHON_PARTS = [
    "[f(", "now()", "s=", "(", ")", "{1, 2}", "b'x'", "1j", "...", "(1,)", "Oslo", '"\\ud800"',
    "{(1, 2): 3}", "-1e999", "f'{x}'", "*a", "lambda: 0", "0x" + "f" * 4000,
]  # fmt: skip
SPACE = [" ", "\n", "", "\u00e9", "\U0001f600", "\x00"]


def texts_for(reader: type[ReplyReader]) -> st.SearchStrategy[str]:
    """Returns texts made of a format's markers and what may be between them."""
    markers = {*reader.special_tokens, *reader.think, *reader.call_markers}
    if (form := reader.call_form) is not None:
        written = [form.before, form.after, form.begin, form.separator, form.end]
        if form.pairs is not None:
            written += [form.pairs.begin, form.pairs.assign, form.pairs.end]
        markers |= {each.replace("NAME", "f") for each in written}
    # A marker that is cut anywhere, too.
    halves = st.builds(
        lambda marker, end: marker[:end], st.sampled_from(sorted(markers)), st.integers(1, 30)
    )
    between = [*JSON_PARTS, *NAMES, *SPACE]
    if form is not None and form.pairs is not None and form.pairs.python_names:
        between += PYTHON_PARTS
    part = st.one_of(
        st.sampled_from(sorted(markers)), st.sampled_from(between), halves, st.text(max_size=3)
    )
    return st.lists(part, max_size=16).map("".join)


def pieces_of(text: str, lengths: Sequence[int]) -> list[str]:
    """Returns a text in pieces of some lengths, which begin again after the last one."""
    pieces = []
    while text:
        length = lengths[len(pieces) % len(lengths)]
        pieces.append(text[:length])
        text = text[length:]
    return pieces


def read(reader: ReplyReader, pieces: Sequence[str], *, is_cut: bool) -> ReplyPiece:
    deltas = [delta for piece in pieces for delta in reader.push(piece)]
    return piece_of([*deltas, *reader.finish(is_cut=is_cut)])


def shape_of(piece: ReplyPiece) -> object:
    return piece.content, piece.reasoning, [(call.name, call.arguments) for call in piece.calls]


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_text_is_read_alike_in_any_pieces_and_json_holds_it(
    name: str, data: st.DataObject
) -> None:
    kind = FORMATS[name]
    text = data.draw(texts_for(kind), label="text")
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=6), label="lengths")
    is_reasoning, is_cut = data.draw(st.booleans()), data.draw(st.booleans())

    whole = read(kind(TOOLS, is_reasoning=is_reasoning), [text], is_cut=is_cut)
    parts = read(kind(TOOLS, is_reasoning=is_reasoning), pieces_of(text, lengths), is_cut=is_cut)

    assert shape_of(parts) == shape_of(whole)
    assert json.loads(json.dumps(shape_of(whole), ensure_ascii=False).encode())
    for call in whole.calls:
        assert call.name
        assert call.arguments or is_cut
        returned = tool_call_of(call.call_id, call.name, call.arguments)["function"]["arguments"]
        assert_plain_object(returned)
        block = Block(0, "tool_use", call, [call.arguments]).whole()
        assert_plain_object(json.dumps(block["input"], ensure_ascii=False))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_every_api_answers_any_text_in_any_steps(data: st.DataObject) -> None:
    kind = FORMATS[data.draw(st.sampled_from(sorted(FORMATS)), label="format")]
    text = data.draw(texts_for(kind), label="text")
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=6), label="lengths")
    is_cut = data.draw(st.booleans())
    reader = kind(TOOLS, is_reasoning=data.draw(st.booleans()))
    steps = [piece_of(reader.push(piece)) for piece in pieces_of(text, lengths)]
    steps.append(piece_of(reader.finish(is_cut=is_cut)))
    outputs = [
        Output(request_id="r", text=step.content, reasoning=step.reasoning, calls=step.calls)
        for step in steps
    ]
    outputs[-1].finish_reason = LENGTH if is_cut else STOP
    calls = joined_calls(call for step in steps for call in step.calls)
    wanted = [(call.name, call.arguments) for call in calls]

    answer = MessageAnswer("m", "model", num_prompt_tokens=1)
    events = [event for output in outputs for event in answer.events(output)]
    events += answer.closing(outputs[-1], Usage())
    blocks = blocks_of(as_json(events))
    assert [
        (block["name"], block["text"]) for block in blocks if block["type"] == "tool_use"
    ] == wanted
    whole = as_json(MessageAnswer("m", "model", num_prompt_tokens=1).whole(outputs, Usage()))
    assert [block["name"] for block in whole["content"] if block["type"] == "tool_use"] == [
        name for name, _ in wanted
    ]

    items = OutputItems(None)
    kinds = [event["type"] for output in outputs for event in as_json(items.push(output))]
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done")
    snapshot = as_json(items.snapshot())
    assert [
        (item["name"], item["arguments"]) for item in snapshot if item["type"] == "function_call"
    ] == wanted
    for output in outputs:
        output_to_proto(output).SerializeToString()


def as_json(value: Any) -> Any:
    """Returns a value as a client reads it."""
    return json.loads(json.dumps(value, ensure_ascii=False, allow_nan=False).encode())


def blocks_of(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the blocks of a stream, each with its text; they begin and end one by one."""
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(blocks)
                blocks.append({**event["content_block"], "text": ""})
                is_open = True
            case "content_block_delta":
                assert is_open
                (text,) = (value for key, value in event["delta"].items() if key != "type")
                blocks[-1]["text"] += text
            case "content_block_stop":
                is_open = False
    assert not is_open
    assert [event["type"] for event in events][-2:] == ["message_delta", "message_stop"]
    return blocks


def assert_plain_object(text: str) -> None:
    """Asserts that a text is a JSON object that a strict reader takes."""

    def refuse(word: str) -> None:
        raise AssertionError(word)

    value = json.loads(text.encode(), parse_constant=refuse)
    assert isinstance(value, dict)
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
