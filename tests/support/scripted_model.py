"""An engine service whose model does one small task with an agent's tools.

    python -m tests.support.scripted_model --port 50051 [--template reasons|plain|no_tools|sees]

It has a context of 128k tokens and a tokenizer of 16k, as prompts of agents have 20,000 tokens. Of
the tools that a prompt offers it calls one that runs commands, to write FILE; when the result is
there, it says that it is done. A conversation may ask for the task again. The template `sees` takes
images: asked to look at one, it calls a tool that reads files, unless it sees one already, and says
how large it is.
"""

import argparse
import asyncio
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from protos.engine.v1 import engine_pb2
from tests.support.fake_engine import EOS_TOKEN_ID, FakeEngine

ROOT = Path(__file__).resolve().parents[2]
MODEL = "scripted"
MAX_MODEL_LEN = 2**17
VOCABULARY = 2**14
FILE, CONTENT = "made.txt", "octavo"
COMMAND = f"printf {CONTENT} > {FILE} && cat {FILE}"
TASK = f"Write the word {CONTENT} to the file {FILE} and show it."
DONE = f"Done: {FILE} says {CONTENT}."
DONE_AGAIN = f"Done again: {FILE} says {CONTENT}."
THOUGHT = "A command can do that."
PICTURE = "picture.png"
LOOK = "What is in the picture at {path}?"
SEEN = "The picture has 2 tokens."
"""The answer to a picture of 64 x 32 pixels."""
RUNNERS = (
    "bash", "shell", "shell_command", "exec_command", "run_shell_command", "execute_command",
    "run_terminal_command", "run_in_terminal", "run_command", "terminal", "run_commands",
)  # fmt: skip
"""Names of tools that run a command, in lower case, without their namespace."""
READERS = ("read", "view_image", "read_file")
"""Names of tools that read a file, likewise."""
COMMANDS = ("command", "cmd", "commands", "script")
"""Names of the arguments that take the command."""
LISTING = "*file listing*"
"""Asks for files in the text of the reply, in words of aider, which has no tools."""
FINISHERS = ("submit_and_exit", "attempt_completion", "task_complete")
"""Names of tools without which some agents do not end; they take the last words."""

IMAGE = "<|image|>"
PROCESSOR = {
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "min_pixels": 1024,
    "max_pixels": 2**20,
    "resample": 3,
    "rescale_factor": 1 / 255,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}

_TURNS = """\
{%- for message in messages %}
{{- "<|im_start|>" + ("user" if message.role == "tool" else message.role) + "\\n" }}
{%- if message.reasoning_content %}
{{- "<think>\\n" + message.reasoning_content + "\\n</think>\\n" }}
{%- endif %}
{%- if message.role == "tool" %}
{{- "<tool_response>\\n" + message.content + "\\n</tool_response>" }}
{%- else %}
{{- message.content or "" }}
{%- endif %}
{%- for call in message.tool_calls or [] %}
{{- "\\n<tool_call>\\n" }}{{ {"name": call.function.name, "arguments": call.function.arguments}
 | tojson }}{{ "\\n</tool_call>" }}
{%- endfor %}
{{- "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\\n" }}{%- endif %}
"""
_TOOLS = """\
{%- if tools %}
{{- "<|im_start|>system\\n<tools>" }}
{%- for tool in tools %}{{ "\\n" }}{{ tool | tojson }}{% endfor %}
{{- "\\n</tools>\\n<tool_call>{}</tool_call><|im_end|>\\n" }}
{%- endif %}
"""
_NO_TOOLS = """\
{%- for message in messages %}
{{- "<|im_start|>" + message.role + "\\n" + message.content + "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\\n" }}{%- endif %}
"""
_THINKING = """\
{%- if add_generation_prompt and enable_thinking is defined and not enable_thinking %}
{{- "<think>\\n\\n</think>\\n\\n" }}
{%- endif %}
"""
_PARTS = """\
{%- macro shown(content) %}
{%- if content is string or content is none %}{{- content or "" }}
{%- else %}{%- for part in content %}
{%- if part.type == "image" %}{{- "<|image|>" }}{%- else %}{{- part.text }}{%- endif %}
{%- endfor %}{%- endif %}
{%- endmacro %}
"""
_SEEING_TURNS = _TURNS.replace("+ message.content +", "+ shown(message.content) +").replace(
    'message.content or ""', "shown(message.content)"
)
TEMPLATES: Mapping[str, str] = {
    "reasons": _TOOLS + _TURNS + _THINKING,
    "plain": _TOOLS + _TURNS.replace("{%- if message.reasoning_content %}", "{%- if false %}"),
    "no_tools": _NO_TOOLS,
    "sees": _PARTS + _TOOLS + _SEEING_TURNS.replace("message.reasoning_content %}", "false %}"),
}


@functools.cache
def tokenizer() -> Tokenizer:
    """A byte-level BPE of VOCABULARY tokens, trained on this repository's own pages and code."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|im_start|>", "<|im_end|>", IMAGE],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(_texts(), trainer)
    return trained


def tokenizer_files(template: str) -> dict[str, bytes]:
    """The tokenizer's files by name, with one of TEMPLATES."""
    config = {"eos_token": "<|im_end|>", "chat_template": TEMPLATES[template]}
    return {
        "tokenizer.json": tokenizer().to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }


def reply_to(prompt: str, *, reasons: bool) -> str:
    """Returns the model's next turn: a call of a tool, or that it is done."""
    if asked := re.search(re.escape(LOOK).replace(r"\{path\}", r"(\S+)"), prompt):
        num_tokens = prompt.count(IMAGE)
        told = f"The picture has {num_tokens} tokens."
        call = None if num_tokens else _call(prompt, READERS, asked[1])
        return told if call is None else f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    before, _, since = prompt.rpartition(TASK)
    done = DONE_AGAIN if DONE in before else DONE
    is_done = "<tool_response>" in since
    call = _call(prompt, FINISHERS, done) if is_done else _call(prompt, RUNNERS, COMMAND)
    text = done if call is None else f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    if LISTING in prompt:
        text = f"{FILE}\n```\n{CONTENT}\n```\n\n{done}"
    thinks = reasons and not prompt.endswith("</think>\n\n")
    return f"<think>\n{THOUGHT}\n</think>\n\n{text}" if thinks else text


def make_engine(template: str) -> FakeEngine:
    """Returns the engine, which is not started yet."""

    def script(prompt: list[int]) -> list[int]:
        text = tokenizer().decode(prompt, skip_special_tokens=False)
        reply = reply_to(text, reasons=template == "reasons")
        return [*tokenizer().encode(reply).ids, EOS_TOKEN_ID]

    processor = engine_pb2.ImageProcessor(
        kind="qwen_vl",
        settings=json.dumps(PROCESSOR),
        image_token_id=tokenizer().token_to_id(IMAGE),
        max_patches=2**14,
        max_image_bytes=2**26,
    )
    return FakeEngine(
        script,
        engine_id="scripted",
        model=MODEL,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCABULARY,
        files=tokenizer_files(template),
        tokens_per_step=4,
        image_processor=processor if template == "sees" else None,
    )


def _texts() -> Iterator[str]:
    for pattern in ("docs/**/*.md", "services/**/*.py"):
        for path in sorted(ROOT.glob(pattern)):
            yield path.read_text()


def _call(prompt: str, names: Sequence[str], text: str) -> dict[str, Any] | None:
    """Returns a call of the first tool with one of the names; None without one.

    Args:
        prompt: lists the tools.
        names: in lower case, without a namespace.
        text: the command, or the last words.
    """
    for function in _functions(prompt):
        if re.split(r"__|\.", function["name"])[-1].lower() in names:
            schema = function.get("parameters") or {}
            return {"name": function["name"], "arguments": _arguments(schema, text)}
    return None


def _functions(prompt: str) -> Iterator[dict[str, Any]]:
    """Yields the functions that a prompt lists in <tools>, one in a line.

    Agents write sections of that name in their own words, too.
    """
    for section in prompt.split("<tools>\n")[1:]:
        for line in section.partition("\n</tools>")[0].splitlines():
            if line.startswith("{"):
                tool = json.loads(line)
                yield tool.get("function", tool)


def _arguments(schema: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Returns a value for each argument that the schema requires, and for that of the command."""
    properties = schema.get("properties", {})
    command = next((name for name in COMMANDS if name in properties), None)
    wanted = dict.fromkeys([*filter(None, [command]), *schema.get("required", ())])
    return {
        name: _command(name, properties[name])
        if name == command
        else _value(properties[name], text)
        for name in wanted
    }


def _command(name: str, schema: Mapping[str, Any]) -> str | list[str]:
    if schema.get("type") != "array":
        return COMMAND
    return [COMMAND] if name == "commands" else ["bash", "-lc", COMMAND]


def _value(schema: Mapping[str, Any], text: str) -> Any:
    if "enum" in schema:
        return schema["enum"][0]
    examples = {"boolean": False, "integer": 10_000, "number": 10_000, "array": [], "object": {}}
    return examples.get(str(schema.get("type")), text)


async def serve(port: int, template: str, host: str = "127.0.0.1") -> None:
    """Serves until it is cancelled."""
    engine = make_engine(template)
    await engine.start(port, host)
    try:
        await asyncio.Event().wait()
    finally:
        await engine.die()


def main() -> None:
    """Runs the engine until it is ended."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--template", choices=TEMPLATES, default="plain")
    options = parser.parse_args()
    asyncio.run(serve(options.port, options.template, options.host))


if __name__ == "__main__":
    main()
