"""Every format: whole replies, the same replies in pieces, and replies that are none."""

import itertools
import json
import random
from collections.abc import Iterable

import pytest

from services.frontend.reply.deltas import CallArguments, CallStart, Content, Delta, Reasoning
from services.frontend.reply.first_object import first_object
from services.frontend.reply.formats.deepseek import DeepseekV3Reader, DeepseekV31Reader
from services.frontend.reply.formats.gemma4 import MAX_DEPTH, Gemma4Reader
from services.frontend.reply.formats.glm4 import Glm4Reader
from services.frontend.reply.formats.harmony import HarmonyReader
from services.frontend.reply.formats.hermes import HermesReader
from services.frontend.reply.formats.kimi_k2 import KimiK2Reader
from services.frontend.reply.formats.llama3_json import Llama3JsonReader
from services.frontend.reply.formats.minimax_m2 import MinimaxM2Reader
from services.frontend.reply.formats.minimax_m3 import MAX_DEPTH as M3_DEPTH
from services.frontend.reply.formats.minimax_m3 import MinimaxM3Reader
from services.frontend.reply.formats.mistral import MistralReader
from services.frontend.reply.formats.pythonic import PythonicReader
from services.frontend.reply.formats.qwen3_coder import Qwen3CoderReader
from services.frontend.reply.formats.seed_oss import SeedOssReader
from services.frontend.reply.incoming_text import IncomingText
from services.frontend.reply.reply_reader import ReplyReader

TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    },
    "now": {"type": "object", "properties": {}},
}
PARIS = {"city": 'Paris "}],', "days": 3}
PARIS_JSON = json.dumps(PARIS)
CALLS = [("get_weather", PARIS), ("now", {})]

REPLIES: dict[str, tuple[type[ReplyReader], str, str, str]] = {
    # format: reader, the reply, its reasoning, its content
    "hermes": (
        HermesReader,
        "<think>\nSo </th and so.\n</think>\n\nLet me < look.\n<tool_call>\n"
        f'{{"name": "get_weather", "arguments": {PARIS_JSON}}}\n</tool_call>\n<tool_call>\n'
        '{"arguments": {}, "name": "now"}\n</tool_call>',
        "So </th and so.",
        "Let me < look.",
    ),
    "llama3_json": (
        Llama3JsonReader,
        f'<|python_tag|>{{"name": "get_weather", "parameters": {PARIS_JSON}}}; '
        '{"type": "function", "name": "now", "parameters": {}}',
        "",
        "",
    ),
    "pythonic": (
        PythonicReader,
        "[get_weather(city='Paris \"}],', days=3), now()]",
        "",
        "",
    ),
    "mistral": (
        MistralReader,
        'I look.[TOOL_CALLS] [{"name": "get_weather", "arguments": '
        f'{PARIS_JSON}}}, {{"name": "now", "arguments": {{}}}}]',
        "",
        "I look.",
    ),
    "mistral v11": (
        MistralReader,
        f"[THINK]Hm.[/THINK]I look.[TOOL_CALLS]get_weather[ARGS]{PARIS_JSON}"
        "[TOOL_CALLS]now[CALL_ID]123456789[ARGS]{}",
        "Hm.",
        "I look.",
    ),
    "mistral v13": (
        MistralReader,
        f"[TOOL_CALLS]get_weather{PARIS_JSON}[TOOL_CALLS]now{{}}",
        "",
        "",
    ),
    "deepseek v3": (
        DeepseekV3Reader,
        "Look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"  # noqa: RUF001
        f"```json\n{PARIS_JSON}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>"  # noqa: RUF001
        "function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",  # noqa: RUF001
        "",
        "Look.",
    ),
    "deepseek v3.1": (
        DeepseekV31Reader,
        "<think>Hm</think>Look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather"  # noqa: RUF001
        f"<｜tool▁sep｜>{PARIS_JSON}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now"  # noqa: RUF001
        "<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",  # noqa: RUF001
        "Hm",
        "Look.",
    ),
    "glm-4.5": (
        Glm4Reader,
        "\n<think>Hm</think>\nLook.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n"
        '<arg_value>Paris "}],</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n'
        "</tool_call>\n<tool_call>now\n</tool_call>",
        "Hm",
        "Look.",
    ),
    "qwen3-coder": (
        Qwen3CoderReader,
        "<think>\nHm\n</think>\n\nLook.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\n"
        'Paris "}],\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n'
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "Hm",
        "Look.",
    ),
    "seed-oss": (
        SeedOssReader,
        "<seed:think>Hm</seed:think>\nLook.\n\n<seed:tool_call>\n<function=get_weather>\n"
        '<parameter=city>Paris "}],</parameter>\n<parameter=days>3</parameter>\n</function>\n'
        "</seed:tool_call>\n<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
        "Hm",
        "Look.",
    ),
    "minimax m2": (
        MinimaxM2Reader,
        "<think>\nHm\n</think>\n\nLook.\n<minimax:tool_call>\n"
        '<invoke name="get_weather">\n<parameter name="city">Paris "}],</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n'
        "</minimax:tool_call>",
        "Hm",
        "Look.",
    ),
    "minimax m3": (
        MinimaxM3Reader,
        "<mm:think>\nHm\n</mm:think>\n\nLook.\n]<]minimax[>[<tool_call>\n"
        ']<]minimax[>[<invoke name="get_weather">]<]minimax[>[<city>Paris "}],]<]minimax[>[</city>'
        "]<]minimax[>[<days>3]<]minimax[>[</days>]<]minimax[>[</invoke>\n"
        ']<]minimax[>[<invoke name="now">]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>',
        "Hm",
        "Look.",
    ),
    "kimi k2": (
        KimiK2Reader,
        "<think>Hm</think>Look.<|tool_calls_section_begin|><|tool_call_begin|>"
        f"functions.get_weather:0<|tool_call_argument_begin|>{PARIS_JSON}<|tool_call_end|>"
        "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "Hm",
        "Look.",
    ),
    "gemma 4": (
        Gemma4Reader,
        "<|channel>thought\nHm<channel|>Look."
        '<|tool_call>call:get_weather{city:<|"|>Paris "}],<|"|>,days:3}'
        "<tool_call|><|tool_call>call:now{}<tool_call|>",
        "Hm",
        "Look.",
    ),
    "harmony": (
        HarmonyReader,
        "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "Look.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        f"<|constrain|>json<|message|>{PARIS_JSON}<|call|><|start|>assistant to=functions.now"
        "<|channel|>commentary json<|message|>{}<|call|>",
        "Hm",
        "Look.",
    ),
}

everywhere = pytest.mark.parametrize("name", REPLIES)


def read(reader: ReplyReader, pieces: Iterable[str]) -> list[Delta]:
    deltas = [delta for piece in pieces for delta in reader.push(piece)]
    return deltas + reader.finish()


def content_of(deltas: Iterable[Delta]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, Content))


def reasoning_of(deltas: Iterable[Delta]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, Reasoning))


def calls_of(deltas: Iterable[Delta]) -> list[tuple[str, str]]:
    """Returns names and arguments, in the order of their indices."""
    calls: list[tuple[str, str]] = []
    for delta in deltas:
        if isinstance(delta, CallStart):
            assert delta.index == len(calls)
            calls.append((delta.name, ""))
        elif isinstance(delta, CallArguments):
            assert delta.index == len(calls) - 1
            name, arguments = calls[-1]
            calls[-1] = (name, arguments + delta.text)
    return calls


@everywhere
def test_a_whole_reply_is_reasoning_content_and_calls(name: str) -> None:
    kind, reply, reasoning, content = REPLIES[name]

    deltas = read(kind(TOOLS), [reply])

    assert [(name, json.loads(text)) for name, text in calls_of(deltas)] == CALLS
    assert (reasoning_of(deltas), content_of(deltas)) == (reasoning, content)


@everywhere
def test_a_reply_in_pieces_is_the_same_as_whole(name: str) -> None:
    kind, reply, reasoning, content = REPLIES[name]
    choose = random.Random(1)
    for lengths in (1, 2, 3, 7, *([None] * 20)):
        pieces, rest = [], reply
        while rest:
            length = lengths or choose.randint(1, 30)
            pieces.append(rest[:length])
            rest = rest[length:]
        deltas = read(kind(TOOLS), pieces)

        assert [(name, json.loads(text)) for name, text in calls_of(deltas)] == CALLS
        assert (reasoning_of(deltas), content_of(deltas)) == (reasoning, content)


def test_a_long_text_that_comes_at_once_is_read_in_short_pieces(monkeypatch) -> None:
    """Each step of a reader moves what is left, so all at once would take long by its square."""
    lengths, push = [], IncomingText.push

    def note_length(text: IncomingText, piece: str) -> None:
        lengths.append(len(piece))
        push(text, piece)

    monkeypatch.setattr(IncomingText, "push", note_length)
    arguments = json.dumps({"list": [{"key": number} for number in range(2000)]})
    reply = f'<tool_call>\n{{"name": "now", "arguments": {arguments}}}\n</tool_call>'

    deltas = read(HermesReader(TOOLS), [reply])

    assert calls_of(deltas) == [("now", arguments)]
    assert len(deltas) == 2
    assert first_object(arguments + " and more") == arguments
    assert max(lengths) <= 2**12


@everywhere
def test_a_reply_cut_off_anywhere_shows_no_half_marker(name: str) -> None:
    kind, reply, reasoning, content = REPLIES[name]
    for end in range(len(reply)):
        reader = kind(TOOLS)
        shown = [delta for character in reply[:end] for delta in reader.push(character)]

        assert content.startswith(content_of(shown))
        assert reasoning.startswith(reasoning_of(shown))
        ended = shown + reader.finish()
        if name not in ("llama3_json", "pythonic"):  # their calls have no marker
            assert not any(marker in content_of(ended) for marker in kind.special_tokens)
        assert [name for name, _ in calls_of(ended)] == [name for name, _ in CALLS][
            : len(calls_of(ended))
        ]


@everywhere
def test_the_name_comes_first_and_arguments_as_they_are_written(name: str) -> None:
    kind, reply, _, _ = REPLIES[name]
    reader = kind(TOOLS)
    steps = [reader.push(character) for character in reply]
    deltas = list(itertools.chain.from_iterable(steps))
    starts = [index for index, delta in enumerate(deltas) if isinstance(delta, CallStart)]

    assert isinstance(deltas[starts[0] + 1], CallArguments)
    pieces = [delta for delta in deltas if isinstance(delta, CallArguments) and delta.index == 0]
    assert len(pieces) > 1


@pytest.mark.parametrize(
    "kind", sorted({kind for kind, *_ in REPLIES.values()}, key=lambda kind: kind.__name__)
)
@pytest.mark.parametrize(
    "reply",
    [
        "Just text.",
        "Two\n\nparagraphs, a < b, [1, 2] and {x}.",
        '{"name": "Ann", "age": 3} is an answer',
        "[1, 2, 3]",
        "ends with space \n",
        "a <tool",
        "",
    ],
)
def test_a_reply_without_calls_is_content_to_the_letter(
    kind: type[ReplyReader], reply: str
) -> None:
    for pieces in ([reply], list(reply)):
        assert read(kind(TOOLS), pieces) == [Content(reply)] * bool(reply) or (
            content_of(read(kind(TOOLS), pieces)) == reply
        )


def test_text_in_the_place_of_a_call_is_content() -> None:
    reply = "Write <tool_call> and </tool_call> around it."

    deltas = read(HermesReader(TOOLS), list(reply))

    assert content_of(deltas) == reply
    assert calls_of(deltas) == []


def test_damaged_arguments_are_passed_on_as_they_are() -> None:
    reply = '<tool_call>{"name": "now", "arguments": {"a": [1}}</tool_call> after'

    deltas = read(HermesReader(TOOLS), [reply])

    assert calls_of(deltas) == [("now", '{"a": [1}}')]
    assert content_of(deltas) == "after"


def test_arguments_written_as_a_string_are_its_content() -> None:
    reply = '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>'

    assert calls_of(read(HermesReader(TOOLS), list(reply))) == [("now", '{"a": 1}')]


def test_a_prompt_that_opens_the_reasoning_needs_no_marker() -> None:
    deltas = read(HermesReader(TOOLS, is_reasoning=True), list("Hm.\n</think>\n\nYes."))

    assert (reasoning_of(deltas), content_of(deltas)) == ("Hm.", "Yes.")


def test_half_a_marker_is_content_unless_the_reply_was_cut_off() -> None:
    for reply in ("I look. <tool_ca", "<think>Hm</think>I look. <tool_ca"):
        for is_cut, content in ((False, "I look. <tool_ca"), (True, "I look.")):
            reader = HermesReader(TOOLS)
            deltas = reader.push(reply) + reader.finish(is_cut=is_cut)
            assert content_of(deltas).rstrip() == content


def test_calls_have_ids_of_their_own() -> None:
    kind, reply, _, _ = REPLIES["mistral"]
    ids = [delta.call_id for delta in read(kind(TOOLS), [reply]) if isinstance(delta, CallStart)]

    assert len(set(ids)) == 2
    assert all(len(each) == 9 and each.isalnum() for each in ids)


def test_calls_of_kimi_k2_have_the_ids_that_the_model_writes() -> None:
    kind, reply, _, _ = REPLIES["kimi k2"]
    for written, name, is_kept in (
        ("functions.now:1", "now", True),
        ("now:12", "now", True),
        ("functions.get_weather:0", "get_weather", False),
        ("no w", "no w", False),
    ):
        deltas = read(kind(TOOLS), list(reply.replace("functions.now:1", written)))
        first, second = (delta for delta in deltas if isinstance(delta, CallStart))
        assert first.call_id == "functions.get_weather:0"
        assert second.name == name
        assert (second.call_id == written) is is_kept
        assert second.call_id.startswith("call_") is not is_kept


def test_arguments_of_gemma_4_become_json() -> None:
    text = '<|"|>x"\ny<|"|>'
    written = (
        f'{{a:[1,-2.5e3,1e+2,true,null,{text}],b:{{c:{{}},<|"|>d e<|"|>:[{text},[]]}}, g : False}}'
    )
    for pieces in ([written], list(written)):
        deltas = read(Gemma4Reader({}), ["<|tool_call>call:now", *pieces, "<tool_call|>", " Done"])
        [(_, arguments)] = calls_of(deltas)
        assert json.loads(arguments) == {
            "a": [1, -2500, 100, True, None, 'x"\ny'],
            "b": {"c": {}, "d e": ['x"\ny', []]},
            "g": False,
        }
        assert content_of(deltas) == "Done"


@pytest.mark.parametrize("written", ["[" * (MAX_DEPTH + 1), "<|x", "", ":", "{a}"])
def test_damaged_arguments_of_gemma_4_are_passed_on(written: str) -> None:
    reply = f"<|tool_call>call:now{{a:{written}}}<tool_call|>Done"
    deltas = read(Gemma4Reader({}), list(reply))
    assert [name for name, _ in calls_of(deltas)] == ["now"]
    assert content_of(deltas) == "Done"


def test_text_beside_calls_of_minimax_m2_is_content() -> None:
    call = '<invoke name="now">\n</invoke>\n'
    reply = (
        f"A <minimax:tool_call> tag.\n<minimax:tool_call>\n{call}</minimax:tool_call>\nDone {call}"
    )
    deltas = read(MinimaxM2Reader(TOOLS), list(reply))
    assert calls_of(deltas) == [("now", "{}")]
    assert content_of(deltas).startswith("A <minimax:tool_call> tag.Done <invoke")


def call_of_m3(arguments: str) -> str:
    """Returns a call, with the tags of its arguments written without the token before each."""
    tagged = arguments.replace("<", "]<]minimax[>[<")
    return (
        f']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="f">{tagged}]<]minimax[>[</invoke>\n'
        "]<]minimax[>[</tool_call>"
    )


M3_SCHEMA = {
    "properties": {
        "text": {"type": "string"},
        "orders": {"type": "array", "items": {"$ref": "#/$defs/order"}},
        "none": {"type": "array"},
        "empty": {"type": "object"},
        "item": {"type": "object", "properties": {"item": {"type": "string"}}},
        "filter": {
            "anyOf": [
                {"type": "object", "properties": {"of": {"const": "s"}, "is": {"type": "string"}}},
                {"type": "object", "properties": {"of": {"const": "n"}, "is": {"type": "number"}}},
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": {"type": "boolean"}},
            ]
        },
    },
    "$defs": {
        "order": {
            "type": "object",
            "properties": {"sku": {"type": "string"}, "counts": {"items": {"type": "integer"}}},
        }
    },
}


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("<text>12</text>", {"text": "12"}),
        ("<text>a > b or\n</text>", {"text": "a > b or\n"}),
        (
            "<orders>\n<item><sku>007</sku><counts><item>1</item><item>2</item></counts></item>\n"
            "<item></item></orders>\n<none></none><empty></empty>",
            {"orders": [{"sku": "007", "counts": [1, 2]}, {}], "none": [], "empty": {}},
        ),
        ("<item><item>1</item></item>", {"item": {"item": "1"}}),
        ("<filter><of>n</of><is>5</is></filter>", {"filter": {"of": "n", "is": 5}}),
        ("<filter><of>s</of><is>x</is></filter>", {"filter": {"of": "s", "is": "x"}}),
        ("<filter><item>true</item></filter>", {"filter": [True]}),
        ("<own><a>1</a><b>x</b></own>", {"own": {"a": 1, "b": "x"}}),
        ("<own><item>1</item><item>x</item></own>", {"own": [1, "x"]}),
        ('<orders>[{"sku": "1"}]</orders>', {"orders": [{"sku": "1"}]}),
        ("<text>a</txt><invoke>true</invoke>", {"text": "a", "invoke": True}),
    ],
)
def test_arguments_of_minimax_m3_become_json(written: str, expected: dict) -> None:
    reply = call_of_m3(written)
    for pieces in ([reply], list(reply)):
        deltas = read(MinimaxM3Reader({"f": M3_SCHEMA}), [*pieces, "Done"])
        [(name, arguments)] = calls_of(deltas)
        assert (name, json.loads(arguments)) == ("f", expected)
        assert content_of(deltas) == "Done"


@pytest.mark.parametrize(
    "written",
    [
        "<a>1",
        "</a>",
        "<a>x<b>1</b></a>",
        "<a><b>1</b>x</a>",
        "<a>" * (M3_DEPTH + 2) + "</a>" * (M3_DEPTH + 2),
    ],
)
def test_damaged_arguments_of_minimax_m3_are_passed_on(written: str) -> None:
    deltas = read(MinimaxM3Reader({}), [*call_of_m3(written), "Done"])
    assert calls_of(deltas) == [("f", written.replace("<", "]<]minimax[>[<"))]
    assert content_of(deltas) == "Done"


@pytest.mark.parametrize("kind", sorted({kind for kind, *_ in REPLIES.values()}, key=str))
def test_a_content_that_the_prompt_has_begun_keeps_its_white_space(kind: type[ReplyReader]) -> None:
    for reply in (" 42\n\n and more\n", '{"name": "now", "parameters": {}}', "[now()] it is"):
        for pieces in ([reply], list(reply)):
            deltas = read(kind(TOOLS, continues=True), pieces)
            assert (content_of(deltas), calls_of(deltas)) == (reply, [])


def test_a_reasoning_that_the_prompt_has_begun_keeps_its_white_space() -> None:
    for pieces in ([" so.\n</think>\n\n Yes"], list(" so.\n</think>\n\n Yes")):
        deltas = read(HermesReader(TOOLS, is_reasoning=True, continues=True), pieces)
        assert (reasoning_of(deltas), content_of(deltas)) == (" so.", "Yes")


def test_calls_may_follow_a_content_that_the_prompt_has_begun() -> None:
    reply = ' look.\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    deltas = read(HermesReader(TOOLS, continues=True), list(reply))
    assert (content_of(deltas), calls_of(deltas)) == (" look.", [("now", "{}")])
