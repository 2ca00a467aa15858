"""A small byte-level tokenizer with a chat template, as the files that a checkpoint has."""

import functools
import json

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CHAT_TEMPLATE = """\
{%- for message in messages %}
{%- if message.role not in ("system", "user", "assistant") %}
{{- raise_exception("no role is called " + message.role) }}
{%- endif %}
{{- "<|im_start|>" + message.role + "\\n" + message.content + "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- "<|im_start|>assistant\\n" }}
{%- endif %}
"""
TOOL_TEMPLATE = """\
{%- if tools %}
{{- "<|im_start|>system\\n" }}
{%- for tool in tools %}{{ (tool | tojson) + "\\n" }}{% endfor %}
{{- "<|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
{{- "<|im_start|>" + message.role + "\\n" }}
{%- if message.content is string %}{{- message.content }}{%- endif %}
{%- for call in message.tool_calls or [] %}
{{- "<call>" + call.function.name + " " + (call.function.arguments | tojson(indent=None)) }}
{%- endfor %}
{{- "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\\n" }}{%- endif %}
"""
"""A chat template that knows tools, the model's calls of them and their answers."""

CORPUS = ["hello world, how are you today? I am fine, thank you.\n", "one two three four five. "]


@functools.cache
def tokenizer_json() -> str:
    """tokenizer.json of a byte-level BPE with two special tokens and a plain added one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 20, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    return tokenizer.to_str()


def tokenizer_files(*, chat_template: str | None = CHAT_TEMPLATE) -> dict[str, bytes]:
    """The tokenizer's files by name; None leaves the chat template out."""
    config = {"eos_token": "<|im_end|>", "chat_template": chat_template}
    return {
        "tokenizer.json": tokenizer_json().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }


@functools.cache
def reference_tokenizer() -> Tokenizer:
    """The tokenizer itself, to compare with."""
    return Tokenizer.from_str(tokenizer_json())
