"""Slips of models: calls that are damaged, cut off, inside the reasoning, or full of markers."""

import json

import pytest

from services.frontend.reply.deltas import ReplyPiece, piece_of
from services.frontend.reply.format_choice import FORMATS
from services.frontend.reply.formats.deepseek import CALL, CALL_END, CALLS, CALLS_END, SEPARATOR

TOOLS = {
    "f": {"properties": {"s": {"type": "string"}, "n": {"$ref": "#/$defs/number"}},
          "$defs": {"number": {"enum": ["1", "2"]}}},
    "now": {"properties": {}},
}  # fmt: skip


def read(name: str, text: str, *, is_reasoning: bool = False, is_cut: bool = False) -> ReplyPiece:
    """Reads a reply as a whole and letter by letter, which must be alike."""
    replies = []
    for pieces in ([text], text):
        reader = FORMATS[name](TOOLS, is_reasoning=is_reasoning)
        deltas = [delta for piece in pieces for delta in reader.push(piece)]
        replies.append(piece_of([*deltas, *reader.finish(is_cut=is_cut)]))
    assert told(replies[0]) == told(replies[1])
    return replies[0]


def told(piece: ReplyPiece) -> tuple[str, str, list[tuple[str, str]]]:
    return piece.reasoning, piece.content, [(call.name, call.arguments) for call in piece.calls]


def hermes(arguments: str, name: str = "f") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def kimi(*calls: str) -> str:
    return f"<|tool_calls_section_begin|>{''.join(calls)}<|tool_calls_section_end|>"


def kimi_call(arguments: str, name: str = "f") -> str:
    begin, end = "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    return f"<|tool_call_begin|>functions.{name}:0{begin}{arguments}{end}"


def deepseek(arguments: str, name: str = "f") -> str:
    return f"{CALLS}{CALL}{name}{SEPARATOR}{arguments}{CALL_END}{CALLS_END}"


def harmony(arguments: str, name: str = "f") -> str:
    header = f"<|channel|>commentary to=functions.{name} <|constrain|>json"
    return f"{header}<|message|>{arguments}<|call|>"


def coder(value: str, key: str = "s") -> str:
    parameter = f"<parameter={key}>\n{value}\n</parameter>"
    return f"<tool_call>\n<function=f>\n{parameter}\n</function>\n</tool_call>"


def seed(value: str, key: str = "s") -> str:
    parameter = f"<parameter={key}>{value}</parameter>"
    return f"<seed:tool_call>\n<function=f>\n{parameter}\n</function>\n</seed:tool_call>"


def glm(value: str, key: str = "s") -> str:
    pair = f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>"
    return f"<tool_call>f\n{pair}\n</tool_call>"


def minimax_m3(value: str, key: str = "s") -> str:
    tag = "]<]minimax[>["
    call = f'{tag}<invoke name="f">{tag}<{key}>{value}{tag}</{key}>{tag}</invoke>\n'
    return f"{tag}<tool_call>\n{call}{tag}</tool_call>"


def minimax(value: str, key: str = "s") -> str:
    parameter = f'<parameter name="{key}">{value}</parameter>'
    return f'<minimax:tool_call>\n<invoke name="f">\n{parameter}\n</invoke>\n</minimax:tool_call>'


OBJECT = '{"s": "x"}'
WHOLE = {
    "hermes": hermes(OBJECT),
    "kimi_k2": kimi(kimi_call(OBJECT)),
    "deepseek_v31": deepseek(OBJECT),
    "harmony": harmony(OBJECT),
    "mistral": f'[TOOL_CALLS] [{{"name": "f", "arguments": {OBJECT}}}]',
    "mistral_v11": f"[TOOL_CALLS]f[ARGS]{OBJECT}",
    "llama3_json": f'<|python_tag|>{{"name": "f", "parameters": {OBJECT}}}',
    "pythonic": '<|python_start|>[f(s="x")]<|python_end|>',
    "gemma4": '<|tool_call>call:f{s:<|"|>x<|"|>}<tool_call|>',
    "qwen3_coder": coder("x"),
    "seed_oss": seed("x"),
    "glm4": glm("x"),
    "minimax_m2": minimax("x"),
    "minimax_m3": minimax_m3("x"),
}
WHOLE["deepseek_v3"] = deepseek(f"f\n```json\n{OBJECT}\n```", "function")
everywhere = pytest.mark.parametrize("name", sorted(WHOLE))


@everywhere
def test_a_call_in_reasoning_that_is_not_closed_is_a_call(name: str) -> None:
    reply = read(name, f"plan {WHOLE[name]}", is_reasoning=True)
    assert told(reply) == ("plan", "", [("f", OBJECT)])


@pytest.mark.parametrize("name", sorted({*WHOLE} - {"harmony"}))
def test_a_call_in_reasoning_that_is_closed_is_reasoning(name: str) -> None:
    end = FORMATS[name].think[1]
    reply = read(name, f"plan {WHOLE[name]} no{end}Yes", is_reasoning=True)
    assert told(reply) == (f"plan {WHOLE[name]} no", "Yes", [])


def test_a_marker_in_reasoning_without_a_call_is_reasoning() -> None:
    for after in ("", f" {WHOLE['hermes']}"):
        reply = read("hermes", f"I write <tool_call> tags.{after}", is_reasoning=True)
        calls = [("f", OBJECT)] if after else []
        assert told(reply) == ("I write <tool_call> tags.", "", calls)


@pytest.mark.parametrize(
    ("name", "reply"),
    [
        ("hermes", hermes("null", "now")),
        ("hermes", '<tool_call>{"arguments": null, "name": "now"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now"}</tool_call>'),
        ("hermes", hermes('"null"', "now")),
        ("llama3_json", '{"name": "now", "parameters": null}'),
        ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": null}]'),
        ("mistral_v11", "[TOOL_CALLS]now[ARGS]null"),
        ("mistral_v11", "[TOOL_CALLS]now[ARGS]"),
        ("deepseek_v31", deepseek("null", "now")),
        ("kimi_k2", kimi(kimi_call("null", "now"))),
        ("harmony", harmony("null", "now")),
        ("harmony", harmony("", "now")),
    ],
)
def test_arguments_that_are_null_or_absent_are_an_empty_object(name: str, reply: str) -> None:
    assert told(read(name, reply)) == ("", "", [("now", "{}")])


@pytest.mark.parametrize(
    ("name", "reply"),
    [
        ("hermes", hermes(f"{OBJECT}}}")),
        ("hermes", hermes(f"{OBJECT} and more")),
        ("hermes", hermes(f'{OBJECT}, "arguments": {{}}')),
        ("hermes", hermes(OBJECT).replace("}}", "}")),
        ("hermes", hermes(OBJECT).removesuffix("</tool_call>")),
        ("llama3_json", f'{{"name": "f", "parameters": {OBJECT}}}}}'),
        ("mistral", f'[TOOL_CALLS][{{"name": "f", "arguments": {OBJECT}}}}}]'),
        ("mistral_v11", f"[TOOL_CALLS]f[ARGS]{OBJECT}}}"),
        ("deepseek_v31", deepseek(f"{OBJECT}}} and more")),
        ("deepseek_v3", deepseek(f"f\n```json\n{OBJECT}}}\n```", "function")),
        ("deepseek_v3", deepseek(f"f\n{OBJECT}", "function")),
        ("kimi_k2", kimi(kimi_call(f"{OBJECT}}}"))),
        ("harmony", harmony(f"{OBJECT}}}")),
        ("gemma4", '<|tool_call>call:f{s:<|"|>x<|"|>}}<tool_call|>'),
    ],
)
def test_text_after_a_complete_object_is_not_added_to_it(name: str, reply: str) -> None:
    assert told(read(name, reply)) == ("", "", [("f", OBJECT)])


@pytest.mark.parametrize(
    ("name", "reply"),
    [
        ("hermes", hermes(f'{OBJECT}}}\n{{"name": "now", "arguments": {{}}')),
        ("hermes", f"{hermes(OBJECT).removesuffix('</tool_call>')}{hermes('{}', 'now')}"),
        ("llama3_json",
         f'{{"name": "f", "parameters": {OBJECT}}}}}; {{"name": "now", "parameters": {{}}}}'),
        ("mistral",
         f'[TOOL_CALLS][{{"name": "f", "arguments": {OBJECT}}}}}, {{"name": "now"}}]'),
        ("mistral_v11", f"[TOOL_CALLS]f[ARGS]{OBJECT}}}[TOOL_CALLS]now[ARGS]"),
        ("kimi_k2",
         kimi(kimi_call(OBJECT).removesuffix("<|tool_call_end|>"), kimi_call("{}", "now"))),
    ],
)  # fmt: skip
def test_a_call_after_a_damaged_end_is_a_call(name: str, reply: str) -> None:
    assert told(read(name, reply)) == ("", "", [("f", OBJECT), ("now", "{}")])


UNCLOSED = '{"s": "x"'


@pytest.mark.parametrize(
    ("name", "reply"),
    [
        ("hermes", hermes(UNCLOSED).replace("}\n</", "</") + hermes("{}", "now")),
        ("mistral_v11", f"[TOOL_CALLS]f[ARGS]{UNCLOSED}[TOOL_CALLS]now[ARGS]"),
        ("deepseek_v31", deepseek(UNCLOSED + CALL_END + f"{CALL}now{SEPARATOR}{{}}")),
        ("deepseek_v3",
         deepseek(f"f\n```json\n{UNCLOSED}\n```{CALL_END}\n{CALL}function{SEPARATOR}now\n```json"
                  "\n{}\n```", "function")),
        ("kimi_k2", kimi(kimi_call(UNCLOSED), kimi_call("{}", "now"))),
        ("harmony", harmony(UNCLOSED) + harmony("{}", "now")),
    ],
)  # fmt: skip
def test_a_brace_too_few_ends_at_the_marker_after_it(name: str, reply: str) -> None:
    assert told(read(name, reply)) == ("", "", [("f", UNCLOSED), ("now", "{}")])


@pytest.mark.parametrize(
    ("name", "reply"),
    [
        ("mistral", f'[TOOL_CALLS] [{{"name": "f", "arguments": {OBJECT}, {{"name": "now"}}]'),
        ("mistral", f'[TOOL_CALLS] [{{"name": "f", "arguments": {OBJECT}}}, {{"name": "now", '
                    '"arguments": {}]'),
        ("llama3_json",
         f'{{"name": "f", "parameters": {OBJECT}; {{"name": "now", "parameters": {{}}}}'),
        ("pythonic", '[f(s="x"), now(),]'),
        ("qwen3_coder", coder("x").replace("</function>", "</function><function=now></function>")),
        ("seed_oss", seed("x").replace("</function>", "</function><function=now></function>")),
    ],
)  # fmt: skip
def test_all_calls_of_an_untidy_list_are_read(name: str, reply: str) -> None:
    assert told(read(name, reply)) == ("", "", [("f", OBJECT), ("now", "{}")])


@pytest.mark.parametrize("name", ["hermes", "kimi_k2", "deepseek_v31", "harmony", "mistral_v11"])
def test_line_breaks_in_strings_are_escaped(name: str) -> None:
    written = '{"s": "a\n\tb\x00\\"\n"}'
    [call] = read(name, WHOLE[name].replace(OBJECT, written)).calls
    assert json.loads(call.arguments) == {"s": 'a\n\tb\x00"\n'}


@pytest.mark.parametrize("after", ["}", " and more", '{"s": "y"}'])
def test_text_after_an_object_in_a_string_is_not_added_to_it(after: str) -> None:
    assert told(read("hermes", hermes(json.dumps(OBJECT + after)))) == ("", "", [("f", OBJECT)])
    for text in ("5 apples", "[1] x"):
        assert told(read("hermes", hermes(json.dumps(text)))) == ("", "", [("f", text)])


def test_a_call_without_arguments_before_another_is_complete() -> None:
    reply = read("mistral_v11", f"[TOOL_CALLS]now[ARGS][TOOL_CALLS]f[ARGS]{OBJECT}")
    assert told(reply) == ("", "", [("now", "{}"), ("f", OBJECT)])


def test_text_after_a_call_that_is_not_closed_is_content() -> None:
    reply = hermes(OBJECT).replace("</tool_call>", "So I called it.")
    assert told(read("hermes", reply)) == ("", "So I called it.", [("f", OBJECT)])


def test_a_list_without_calls_is_none() -> None:
    assert told(read("mistral", "[TOOL_CALLS] []")) == ("", "", [])


@pytest.mark.parametrize(
    ("name", "reply"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments":'),
        ("llama3_json", '{"name": "f", "para'),
        ("mistral_v11", "[TOOL_CALLS]f[ARGS]"),
        ("deepseek_v31", f"{CALLS}{CALL}f{SEPARATOR}"),
        ("kimi_k2", kimi_call("").removesuffix("<|tool_call_end|>")),
        ("harmony", harmony("").removesuffix("<|call|>")),
        ("gemma4", "<|tool_call>call:f{s:"),
        ("pythonic", '[f(s="x'),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=s>\nx"),
        ("glm4", "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>x"),
        ("minimax_m2", '<minimax:tool_call>\n<invoke name="f">\n<parameter name="s">x'),
        ("minimax_m3", ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="f">]<]minimax[>[<s>x'),
    ],
)
def test_a_call_that_is_cut_off_before_its_arguments_has_none(name: str, reply: str) -> None:
    assert told(read(name, reply, is_cut=True)) == ("", "", [("f", "")])


def test_damaged_arguments_keep_their_text() -> None:
    for name, reply, arguments in (
        ("hermes", hermes('{"s": [1}'), '{"s": [1}}\n'),
        ("hermes", hermes(r'"{\"s\": \x}"'), r'"{\"s\": \x}"'),
        ("hermes", hermes("None"), "None}\n"),
        ("kimi_k2", kimi(kimi_call('{"s": [1}')), '{"s": [1}'),
        ("harmony", harmony('{"s": [1}'), '{"s": [1}'),
        ("llama3_json", '{"name": "f", "parameters": {"s": [1}}', '{"s": [1}}'),
        ("gemma4", "<|tool_call>call:f{s:[1}<tool_call|>", "s:[1}"),
    ):
        assert told(read(name, reply)) == ("", "", [("f", arguments)])


@pytest.mark.parametrize(
    ("name", "write", "value"),
    [
        ("qwen3_coder", coder, "x </parameter> y"),
        ("qwen3_coder", coder, "a</function>\n</tool_call> <tool_call> </parameter>\n b"),
        ("seed_oss", seed, "x </parameter> y"),
        ("minimax_m2", minimax, "x </parameter>\n</minimax:tool_call> y"),
        ("minimax_m3", minimax_m3, "x </s></invoke></tool_call> ]<] y"),
        ("glm4", glm, "a</arg_value>b<arg_key></tool_call>"),
    ],
)
def test_markers_inside_a_value_do_not_cut_it(name: str, write, value: str) -> None:
    [call] = read(name, write(value)).calls
    assert json.loads(call.arguments) == {"s": value}


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("qwen3_coder", coder),
        ("seed_oss", seed),
        ("minimax_m2", minimax),
        ("minimax_m3", minimax_m3),
        ("glm4", glm),
    ],
)
def test_bare_values_follow_references(name: str, write) -> None:
    [call] = read(name, write("1", "n")).calls
    assert json.loads(call.arguments) == {"n": "1"}


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("s={1, 2}", {"s": [1, 2]}),
        ('s=b"x"', {"s": 'b"x"'}),
        ("s=1j", {"s": "1j"}),
        ("s=...", {"s": "..."}),
        ("s=(1, -2.5, None)", {"s": [1, -2.5, None]}),
        ("s={(1, 2): 3, 4: True}", {"s": {"[1, 2]": 3, "4": True}}),
        ("s=[Oslo, f(1)]", {"s": ["Oslo", "f(1)"]}),
        ("s=1e999", {"s": "1e999"}),
        ("s=NaN", {"s": "NaN"}),
        ("s=Oslo", {"s": "Oslo"}),
        ("s=New York", {"s": "New York"}),
        ("s=datetime(2026, 1, 2), n=2", {"s": "datetime(2026, 1, 2)", "n": 2}),
        ("s=0x" + "f" * 4000, {"s": "0x" + "f" * 4000}),
        ("s=", {"s": ""}),
        ("'Oslo'", {"s": "Oslo"}),
        ("Oslo, 2, 3", {"s": "Oslo", "n": 2, "arg3": 3}),
        ("n=2, 'Oslo',", {"n": 2, "s": "Oslo"}),
        ("s='a' == 'b'", {"s": "'a' == 'b'"}),
        (r's="\d"', {"s": r"\d"}),
    ],
)
def test_a_call_in_python_keeps_the_text_that_json_lacks(written: str, arguments: object) -> None:
    [call] = read("pythonic", f"[f({written})]").calls
    assert json.loads(call.arguments) == arguments


def test_half_a_surrogate_pair_becomes_a_replacement_character() -> None:
    half = r"\ud83d"
    for name, reply, call in (
        ("hermes", hermes("{}", f"a{half}"), ("a\ufffd", "{}")),
        ("hermes", hermes(rf'"{{\"s\": 1{half}"'), ("f", '{"s": 1\ufffd')),
        ("hermes", hermes(rf'"{half}\ude00"'), ("f", "\U0001f600")),
        ("pythonic", f"[f(s='{half}')]", ("f", '{"s": "\ufffd"}')),
    ):
        assert told(read(name, reply)) == ("", "", [call])
