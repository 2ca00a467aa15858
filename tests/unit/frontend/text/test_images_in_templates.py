"""Chat templates get images as parts of contents, in the messages that take them."""

import pytest

from services.frontend.text.chat_template import ChatTemplate, TemplateError
from services.frontend.text.content_parts import joined

SHOWN = (
    "{%- macro shown(content) %}{%- if content is string %}{{- content }}{%- else %}"
    "{%- for part in content or [] %}{%- if part.type == 'image' %}{{- '<img>' }}{%- else %}"
    "{{- part.text }}{%- endif %}{%- endfor %}{%- endif %}{%- endmacro %}"
)
CALLS = "{%- for call in m.tool_calls or [] %}{{- '!' + call.function.name }}{%- endfor %}"
EVERYWHERE = (
    f"{SHOWN}{{%- for m in messages %}}{{{{- '[' + m.role + ']' + shown(m.content) }}}}{CALLS}"
    "{%- endfor %}"
)
TEXT_OF_TOOLS = EVERYWHERE.replace(
    "shown(m.content)", "(m.content | string if m.role == 'tool' else shown(m.content))"
)
"""Writes the results of tools as text, whatever they are."""
ALTERNATING = (
    "{%- set turn = namespace(number=0) %}{%- for m in messages %}"
    "{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{%- if (m.role == 'user') != (turn.number % 2 == 0) %}"
    "{{- raise_exception('roles must alternate') }}{%- endif %}"
    "{%- set turn.number = turn.number + 1 %}{%- endif %}{%- endfor %}" + TEXT_OF_TOOLS
)
"""A template that also wants the assistant after a tool, as Mistral's do."""
TEXT_ALONE = "{%- for m in messages %}{{- m.content }}{%- endfor %}"
WITHOUT_TOOLS = EVERYWHERE.replace(CALLS, "")
LEAVES_OUT = EVERYWHERE.replace("'<img>'", "''")
IMAGES_FIRST = (
    "{%- for m in messages %}{%- for p in m.content | selectattr('type', 'equalto', 'image') %}"
    "{{- '<img>' }}{%- endfor %}"
    "{%- for p in m.content | selectattr('type', 'equalto', 'text') %}{{- p.text }}{%- endfor %}"
    "{%- endfor %}"
)
"""Iterates over parts alone."""

IMAGE = {"type": "image"}
CALL = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def text(value: str) -> dict:
    return {"type": "text", "text": value}


ASKED = [{"role": "user", "content": [text("What is "), IMAGE, text("?")]}]
LOOKED = [
    {"role": "user", "content": "Look!"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call00001", "content": [text("This:"), IMAGE]},
    {"role": "tool", "tool_call_id": "call00001", "content": [IMAGE]},
]
WENT_ON = [*LOOKED, {"role": "assistant", "content": "A cat."}, {"role": "user", "content": "So?"}]


def render(source, messages, *, is_strict=False):
    template = ChatTemplate(
        source, {}, special_tokens=["<img>"], is_strict=is_strict, writes_tools=True
    )
    rendered = template.render(messages, max_bytes=10_000, marks_content=True)
    return rendered.replace(rendered[0], "")


def test_images_are_parts_among_texts():
    assert render(EVERYWHERE, ASKED) == "[user]What is <img>?"
    assert render(IMAGES_FIRST, ASKED) == "<img>What is ?"


@pytest.mark.parametrize("source", [TEXT_ALONE, LEAVES_OUT])
def test_a_template_that_shows_no_images_refuses_them(source):
    with pytest.raises(TemplateError, match="takes no images in messages of 'user'"):
        render(source, ASKED)


def test_results_of_tools_show_their_images():
    assert render(EVERYWHERE, LOOKED) == ("[user]Look![assistant]!look[tool]This:<img>[tool]<img>")


def test_users_show_the_images_of_results_where_they_alone_can():
    begun = "[user]Look![assistant]!look[tool]This:[tool]"
    assert render(TEXT_OF_TOOLS, LOOKED) == f"{begun}[user]<img><img>"
    assert render(TEXT_OF_TOOLS, WENT_ON) == (f"{begun}[user]<img><img>[assistant]A cat.[user]So?")
    more = [*LOOKED, {"role": "user", "content": "So?"}]
    assert render(TEXT_OF_TOOLS, more) == f"{begun}[user]<img><img>\nSo?"


def test_the_assistant_speaks_before_the_user_where_turns_must_alternate():
    begun = "[user]Look![assistant]!look[tool]This:[tool][assistant]The result is an image."
    assert render(ALTERNATING, LOOKED) == f"{begun}[user]<img><img>"
    assert render(ALTERNATING, WENT_ON) == f"{begun}[user]<img><img>[assistant]A cat.[user]So?"


def test_strict_templates_refuse_images_of_results():
    with pytest.raises(TemplateError, match="takes no images in messages of 'tool'"):
        render(TEXT_OF_TOOLS, LOOKED, is_strict=True)


def test_written_results_keep_their_images():
    prompt = render(WITHOUT_TOOLS, LOOKED)
    assert prompt.endswith(
        "[user]<tool_response>\nThis:<img>\n</tool_response>\n"
        "<tool_response>\n<img>\n</tool_response>"
    )


def test_joined_contents_are_parts_only_with_images():
    assert joined(["a", None, "b"], "\n") == "a\n\nb"
    assert joined([]) == ""
    assert joined(["a", [IMAGE], "b", "c"]) == [text("a"), IMAGE, text("bc")]
    assert joined([[IMAGE], [IMAGE]], "\n") == [IMAGE, text("\n"), IMAGE]
    assert joined([[text("a"), text("b")]]) == "ab"
