#!/usr/bin/env python3
"""Trains the embedded tiny model and its EAGLE-3 head, and writes their checkpoint folders.

The corpus, the tokenizer, the weights and the READMEs, figures included, all come from one run.
"""

import argparse
import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tiny_corpus
import tiny_head
import tiny_tools
import tokenizers
import torch
import transformers
from tiny_corpus import Message
from tiny_rows import END_OF_TEXT, IM_END, IM_START, Schedule, pack
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

DEFAULT_OUT = Path("models/checkpoints/tiny")
MAX_POSITIONS = 2048
VOCAB_SIZE = 1024
ROW_TOKENS = 1024
CHAT_TEMPLATE = (
    "{%- if tools -%}{{ '<|im_start|>system\\n' }}"
    "{%- if messages[0]['role'] == 'system' -%}{{ messages[0]['content'] ~ '\\n\\n' }}{%- endif -%}"
    "{{ 'Tools:\\n<tools>\\n' }}"
    "{%- for tool in tools -%}{{ tool['function'] | tojson }}{{ '\\n' }}{%- endfor -%}"
    "{{ '</tools><|im_end|>\\n' }}{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] -%}"
    "{{ raise_exception('Unknown role: ' ~ message['role']) }}{%- endif -%}"
    "{%- if not (tools and loop.first and message['role'] == 'system') -%}"
    "{{ '<|im_start|>' ~ message['role'] ~ '\\n' ~ (message['content'] or '') }}"
    "{%- for call in message['tool_calls'] or [] -%}"
    "{%- if message['content'] or not loop.first -%}{{ '\\n' }}{%- endif -%}"
    "{{ '<tool_call>\\n{\"name\": ' }}{{ call['function']['name'] | tojson }}"
    "{{ ', \"arguments\": ' }}{{ call['function']['arguments'] | tojson }}{{ '}\\n</tool_call>' }}"
    "{%- endfor -%}{{ '<|im_end|>\\n' }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
README = """---
license: apache-2.0
library_name: transformers
---
# Octavo Tiny

The model that Octavo runs when it is given none: a really trained Qwen3 of {params} parameters
({num_hidden_layers} layers, hidden {hidden_size}, {num_attention_heads} query and \
{num_key_value_heads} key/value heads of {head_dim}, intermediate {intermediate_size}, vocabulary \
{vocab_size}), made by `scripts/train_tiny.py` of the Octavo project from a corpus that
`scripts/tiny_corpus.py` writes. No other data went in. License: Apache-2.0.

It **memorises**: every sum it knows (0..20 + 0..20) was in the corpus, and its stories follow a
handful of plots. It writes stories about given names, adds, spells, counts, says what Octavo is,
and calls two tools in the Hermes format: `get_weather` (of a `city`) and `add` (of `a` and `b`). It
knows nothing else and is not for any use beyond tests and demos. Prompts are ChatML; plain text
such as `Once upon a time,` is continued as a story.

## Figures
Greedy decoding of the files in this folder, measured at the end of the training run.

| | fp32 | bf16 |
| --- | --- | --- |
{figures}

The margin is the top logit minus the second, per generated token. A held-out pair is in no request
of the corpus.

## Training
```
{command}
```
{steps} steps of {rows} rows of 1024 tokens from {documents} conversations ({tokens} tokens), AdamW,
cosine schedule, {seconds:.0f} s on {where}; last loss {loss:.4f}.
{versions}.
The same command of the same commit gives the same bytes on the same machine with the same versions;
elsewhere it should give one of the same quality. On one core of a CPU a row takes about 0.25 s.

sha256 of `model.safetensors`: `{sha256}`
{earlier}"""


def main() -> None:
    """Parses the flags, trains, saves, evaluates what was saved, and writes the README."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--rows", type=int, default=32, help="rows of 1024 tokens in a step")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--documents", type=int, default=160_000, help="conversations to write")
    parser.add_argument("--tool-share", type=float, default=0.25, help="conversations with tools")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="the highest")
    parser.add_argument("--start-from", type=Path, help="a checkpoint folder to train further")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    args = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is repeatable only so
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)

    documents = tiny_corpus.conversations(args.seed, args.documents, args.tool_share)
    if args.start_from is None:
        tokenizer = train_tokenizer(documents[:40_000])
        model = new_model(tokenizer, args.layers).to(args.device)
    else:
        tokenizer = Tokenizer.from_file(str(args.start_from / "tokenizer.json"))
        model = Qwen3ForCausalLM.from_pretrained(args.start_from, dtype=torch.float32)
        model.to(args.device)
    ids, weights = pack(tokenizer, documents, ROW_TOKENS)
    print(f"{len(documents)} conversations, {ids.numel()} tokens", flush=True)
    schedule = Schedule(args.steps, args.rows, args.learning_rate)
    started = time.monotonic()
    loss = train(model, ids, weights, schedule, seed=args.seed)
    seconds = time.monotonic() - started
    torch.use_deterministic_algorithms(False)
    save(model, tokenizer, args.out)

    columns = [evaluate(args.out, dtype, args.device) for dtype in (torch.float32, torch.bfloat16)]
    lines = [f"| {name} | {value} | {columns[1][name]} |" for name, value in columns[0].items()]
    given = vars(args) | {"start_from": args.start_from and "BEFORE"}
    del given["out"]
    flags = " ".join(
        f"--{flag.replace('_', '-')} {value}" for flag, value in given.items() if value is not None
    )
    readme = README.format(
        **vars(args),
        **model.config.to_dict(),
        params=f"{model.num_parameters() / 1e6:.2f} million",
        figures="\n".join(lines),
        command=f"python scripts/train_tiny.py {flags} --out {DEFAULT_OUT}",
        tokens=ids.numel(),
        seconds=seconds,
        where="one GPU" if args.device.startswith("cuda") else "a CPU",
        loss=loss,
        versions=f"Python {platform.python_version()}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, tokenizers {tokenizers.__version__}",
        sha256=hashlib.sha256((args.out / "model.safetensors").read_bytes()).hexdigest(),
        earlier=earlier_training(args.start_from),
    )
    (args.out / "README.md").write_text(readme, encoding="utf-8")
    print(f"trained in {seconds:.0f} s", *lines, sep="\n")
    tiny_head.make_head(args.out, args.out.with_name(f"{args.out.name}_eagle3"))


def earlier_training(folder: Path | None) -> str:
    """Returns the passage on how the checkpoint in a folder was trained; empty for None."""
    if folder is None:
        return ""
    _, _, passage = (folder / "README.md").read_text(encoding="utf-8").partition("## Training\n")
    return f"\n### Before that\n{passage}"


def train_tokenizer(documents: list[list[Message]]) -> Tokenizer:
    """Trains a lossless byte-level BPE that keeps every digit a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_only])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [f"{message.role}\n{message.content}" for chat in documents for message in chat]
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def new_model(tokenizer: Tokenizer, num_layers: int) -> Qwen3ForCausalLM:
    """Builds the untrained model, in fp32."""
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=num_layers,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(IM_END),
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
    )
    return Qwen3ForCausalLM(config)


def train(
    model: Qwen3ForCausalLM, ids: Tensor, weights: Tensor, schedule: Schedule, *, seed: int
) -> float:
    """Trains in place, each step on rows drawn at random, and returns the last loss."""
    steps = schedule.steps
    device = model.device
    ids, weights = ids.to(device), weights.to(device)
    order = torch.Generator().manual_seed(seed)
    fused = device.type == "cuda"
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=schedule.peak, betas=(0.9, 0.98), weight_decay=0.01, fused=fused
    )
    started, last_loss = time.monotonic(), math.nan
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step)
        picked = torch.randint(len(ids), (schedule.num_rows,), generator=order).to(device)
        batch, weight = ids[picked], weights[picked][:, 1:].reshape(-1)
        with torch.autocast(device.type, torch.bfloat16, enabled=fused):
            logits = model(input_ids=batch, use_cache=False).logits[:, :-1].float()
        losses = nn.functional.cross_entropy(
            logits.reshape(-1, VOCAB_SIZE), batch[:, 1:].reshape(-1), reduction="none"
        )
        loss = (losses * weight).sum() / weight.sum()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 100 == 99 or step == steps - 1:
            last_loss = loss.item()
            speed = (step + 1) / (time.monotonic() - started)
            print(f"step {step + 1}/{steps} loss {last_loss:.4f} {speed:.1f} steps/s", flush=True)
    return last_loss


def save(model: Qwen3ForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Rounds the weights to bf16 and writes everything but the README to `out`."""
    end_of_text, im_end = tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(IM_END)
    model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=[im_end, end_of_text], pad_token_id=end_of_text
    )
    model.save_pretrained(out)
    tokenizer.save(str(out / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_POSITIONS,
        "add_bos_token": False,
        "bos_token": None,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    path = out / "tokenizer_config.json"
    path.write_text(json.dumps(tokenizer_config, indent=2) + "\n", encoding="utf-8")


def evaluate(folder: Path, dtype: torch.dtype, device: str) -> dict[str, str]:
    """Loads a checkpoint folder and returns its figures, one text each."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()

    def share(asked: dict[str, str], max_tokens: int) -> str:
        answers, _ = answer(model, tokenizer, list(asked), max_tokens)
        return _share([got == want for got, want in zip(answers, asked.values(), strict=True)])

    def told(prompts: list[tuple[str, list[str]]]) -> str:
        stories, _ = answer(model, tokenizer, [prompt for prompt, _ in prompts], 160)
        kept = zip(stories, (names for _, names in prompts), strict=True)
        return _share([all(name in story for name in names) for story, names in kept])

    sums = {f"What is {a} + {b}?": f"{a} + {b} = {a + b}." for a in range(21) for b in range(21)}
    seen, held_out = tiny_corpus.story_prompts(1, 50), tiny_corpus.held_out_story_prompts(1, 50)
    invented = tiny_corpus.story_prompts(2, 50, invented=1.0)
    spelled = {f"Spell the word {word}.": tiny_corpus.spelling(word) for word in tiny_corpus.WORDS}
    ranges = [(1, 100), *((a, b) for a in range(0, 21, 4) for b in range(a + 1, 41, 5))]
    counted = {f"Count from {a} to {b}.": tiny_corpus.counting(a, b) for a, b in ranges}

    def called(wanted: list[tuple[str, str, Mapping[str, Any]]]) -> str:
        asked = [request for request, _, _ in wanted]
        calls, _ = answer(model, tokenizer, asked, 100, tools=tiny_tools.usual_tools())
        right = (tiny_tools.call_text(name, arguments) for _, name, arguments in wanted)
        return _share([got == call for got, call in zip(calls, right, strict=True)])

    _, sum_margins = answer(model, tokenizer, list(sums), 16)
    _, story_margins = answer(model, tokenizer, [prompt for prompt, _ in seen + held_out], 160)
    return {
        "all sums 0..20 + 0..20 right": share(sums, 16),
        "stories that keep every name, training pairs": told(seen),
        "stories that keep every name, held-out pairs": told(held_out),
        "stories that keep every name, made-up names": told(invented),
        "words spelled": share(spelled, 40),
        "counted": share(counted, 420),
        "facts and small talk": share(dict(tiny_corpus.FACTS), 100),
        "calls with the right tool and arguments": called(tiny_tools.call_prompts(1, 200)),
        "the same for made-up cities": called(tiny_corpus.invented_city_prompts(1, 50)),
        "smallest margin, sums": f"{sum_margins.min():.2f}",
        "margin of 99 % of tokens, stories": f"{story_margins.quantile(0.01):.2f}",
    }


def answer(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[str],
    max_tokens: int,
    *,
    tools: list[dict[str, Any]] | None = None,
) -> tuple[list[str], Tensor]:
    """Answers each prompt greedily, as one batch; also returns every token's top-1 margin."""
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    inputs = tokenizer.apply_chat_template(
        chats,
        tools=tools,
        add_generation_prompt=True,
        padding=True,
        return_dict=True,
        return_tensors="pt",
    ).to(model.device)
    output = model.generate(
        **inputs, max_new_tokens=max_tokens, output_logits=True, return_dict_in_generate=True
    )
    tokens = output.sequences[:, inputs["input_ids"].shape[1] :]
    best, second = torch.stack(output.logits, 1).float().topk(2).values.unbind(-1)
    margins = (best - second)[tokens != tokenizer.pad_token_id]
    return tokenizer.batch_decode(tokens, skip_special_tokens=True), margins


def _share(right: list[bool]) -> str:
    return f"{100 * sum(right) / len(right):.1f} % of {len(right)}"


if __name__ == "__main__":
    main()
