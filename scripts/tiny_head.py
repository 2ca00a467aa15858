#!/usr/bin/env python3
"""Trains an EAGLE-3 head for the embedded tiny model and writes its checkpoint folder.

The head learns the model's own greedy tokens from the states of its layers. A few drafts are
unrolled in training, so that the head also learns from its own states.
"""

import argparse
import hashlib
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny_corpus
import torch
import transformers
from safetensors.torch import save_file
from tiny_rows import Schedule, pack
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM

DEFAULT_MODEL = Path("models/checkpoints/tiny")
DEFAULT_OUT = Path("models/checkpoints/tiny_eagle3")
DRAFT_VOCAB_SIZE = 384
NUM_HEADS, HEAD_DIM, INTERMEDIATE_SIZE = 2, 32, 128
AUX_LAYERS = (0, 1, 2)
NUM_UNROLLED = 4
DECAY = 0.8  # of the loss weight, from one draft to the next
LEARNING_RATE = 3e-3
README = """---
license: apache-2.0
---
# An EAGLE-3 head for Octavo Tiny

It guesses tokens for the model in `{model}`, from the states of its layers:

```
octavo engine --num-speculative-tokens 3 --draft-model {out}
```

`scripts/tiny_head.py` made it from the corpus that `scripts/tiny_corpus.py` writes and from the
model's own greedy tokens. It has {params} parameters of its own, may guess {vocab} of the {all}
tokens, and uses the model's embedding. License: Apache-2.0.

## Figures
Share of drafts that equal the model's greedy token, on conversations of another seed. Each draft
follows the right tokens.

| draft | share |
| --- | --- |
{figures}

## Training
```
python scripts/tiny_head.py --seed {seed} --steps {steps} --rows {rows} --documents {documents}
```
{seconds:.0f} s on one thread of a CPU. {versions}.
The same command of the same commit gives the same bytes on the same machine with the same versions.

sha256 of `model.safetensors`: `{sha256}`
"""


Hook = Callable[[nn.Module, Any, Any], None]
"""Sees a module's inputs and output."""


class Norm(nn.Module):
    """A root-mean-square norm."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Maps [..., size] to the same shape."""
        return nn.functional.rms_norm(x, self.weight.shape, self.weight, 1e-6)


class SelfAttention(nn.Module):
    """Projections of the head's attention; one key/value head."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(2 * hidden, NUM_HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(2 * hidden, HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(2 * hidden, HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(NUM_HEADS * HEAD_DIM, hidden, bias=False)


class Mlp(nn.Module):
    """A gated MLP."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, INTERMEDIATE_SIZE, bias=False)
        self.up_proj = nn.Linear(hidden, INTERMEDIATE_SIZE, bias=False)
        self.down_proj = nn.Linear(INTERMEDIATE_SIZE, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [..., hidden] to the same shape."""
        gated = nn.functional.silu(self.gate_proj(x)) * self.up_proj(x)
        made: Tensor = self.down_proj(gated)
        return made


class MidLayer(nn.Module):
    """The head's layer, for one draft of every position at a time."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.input_layernorm = Norm(hidden)
        self.hidden_norm = Norm(hidden)
        self.post_attention_layernorm = Norm(hidden)
        self.self_attn = SelfAttention(hidden)
        self.mlp = Mlp(hidden)

    def forward(
        self, embedded: Tensor, hidden: Tensor, entries: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Maps embeddings and states, [N, T, hidden] each, to the next states.

        entries: keys and values [N, T, head_dim] of earlier drafts; this draft's are appended. The
        query of draft d at position t attends to the first draft's entries up to t - d, and to
        one entry of each later draft.
        """
        attention, depth = self.self_attn, len(entries)
        num_tokens = hidden.shape[1]
        joined = torch.cat((self.input_layernorm(embedded), self.hidden_norm(hidden)), dim=-1)
        positions = torch.arange(num_tokens)
        queries = attention.q_proj(joined).unflatten(-1, (NUM_HEADS, HEAD_DIM)).transpose(1, 2)
        queries = rotate(queries, positions)
        entries.append((rotate(attention.k_proj(joined), positions), attention.v_proj(joined)))
        keys, values = entries[0]
        is_visible = positions[None, :] <= positions[:, None] - depth
        scores = queries @ keys[:, None].transpose(-1, -2)
        parts = [scores.masked_fill(~is_visible, float("-inf"))]
        later = [
            (shifted(each_keys, depth - number), shifted(each_values, depth - number))
            for number, (each_keys, each_values) in enumerate(entries[1:], start=1)
        ]
        parts += [(queries * each[:, None]).sum(-1, keepdim=True) for each, _ in later]
        weights = (torch.cat(parts, dim=-1) * HEAD_DIM**-0.5).softmax(dim=-1)
        mixed = weights[..., :num_tokens] @ values[:, None]
        for number, (_, each_values) in enumerate(later):
            mixed = mixed + weights[..., num_tokens + number, None] * each_values[:, None]
        hidden = hidden + attention.o_proj(mixed.transpose(1, 2).flatten(2))
        states: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return states


class Head(nn.Module):
    """The head, with the parameter names of a checkpoint."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.fc = nn.Linear(len(AUX_LAYERS) * hidden, hidden, bias=False)
        self.midlayer = MidLayer(hidden)
        self.norm = Norm(hidden)
        self.lm_head = nn.Linear(hidden, DRAFT_VOCAB_SIZE, bias=False)

    def forward(self, embedded: Tensor, states: Tensor) -> list[Tensor]:
        """Returns the logits of each draft, [N, T, draft vocabulary].

        Those of draft d at position t are of the token at t + 2.

        Args:
            embedded: [N, T, hidden], the embedding of the token after each position.
            states: [N, T, 3 * hidden] of the model.
        """
        hidden = self.fc(states)
        entries: list[tuple[Tensor, Tensor]] = []
        logits = []
        for _ in range(NUM_UNROLLED):
            made = self.midlayer(embedded, hidden, entries)
            logits.append(self.lm_head(self.norm(made)))
            hidden = shifted(made, 1)
        return logits


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotates the halves of [..., T, head_dim] by the positions [T]."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * 10000.0 ** (-torch.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def shifted(x: Tensor, distance: int) -> Tensor:
    """Moves [N, T, n] to later positions; the first ones are zero."""
    if not distance:
        return x
    return nn.functional.pad(x, (0, 0, distance, 0))[:, :-distance]


class Target:
    """The model that the head guesses for."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._outputs: dict[int, Tensor] = {}
        for layer in AUX_LAYERS:
            # Hooks, as transformers norms the last of the hidden states that it returns.
            self.model.model.layers[layer].register_forward_hook(self._keeping(layer))

    def _keeping(self, layer: int) -> Hook:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            self._outputs[layer] = output[0] if isinstance(output, tuple) else output

        return keep

    @torch.inference_mode()
    def read(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns states [N, T, 3 * hidden], embeddings [N, T, hidden] and greedy tokens [N, T].

        ids: [N, T].
        """
        logits = self.model(input_ids=ids, use_cache=False).logits
        states = torch.cat([self._outputs[layer] for layer in AUX_LAYERS], dim=-1)
        return states, self.model.model.embed_tokens(ids), logits.argmax(-1)


def likeliest_tokens(target: Target, ids: Tensor) -> Tensor:
    """Returns the tokens that the model says most often, ascending, [draft vocabulary]."""
    counts = torch.zeros(target.model.config.vocab_size, dtype=torch.int64)
    for rows in ids.split(4):
        counts += torch.bincount(target.read(rows)[2].flatten(), minlength=len(counts))
    order = counts.argsort(descending=True, stable=True)
    return order[:DRAFT_VOCAB_SIZE].sort().values


def losses_of(
    head: Head, target: Target, ids: Tensor, guess_of: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Returns loss and share of right guesses of each draft.

    guess_of: [vocab], the guess of a token; -1 if the head cannot guess it.
    """
    states, embedded, greedy = target.read(ids)
    states, embedded = states.clone(), embedded.clone()  # autograd refuses inference tensors
    all_logits = head(embedded[:, 1:], states[:, :-1])
    wanted = guess_of[greedy[:, 1:]]
    found = []
    for depth, logits in enumerate(all_logits):
        guesses, right = logits[:, depth:], wanted[:, depth:]
        loss = nn.functional.cross_entropy(guesses.flatten(0, 1), right.flatten(), ignore_index=-1)
        found.append((loss, (guesses.argmax(-1) == right).float().mean()))
    return found


def train(head: Head, target: Target, ids: Tensor, guess_of: Tensor, schedule: Schedule) -> None:
    """Trains in place, on rows in their order."""
    optimizer = torch.optim.AdamW(
        head.parameters(), lr=schedule.peak, betas=(0.9, 0.95), weight_decay=0.01
    )
    started = time.monotonic()
    for step in range(schedule.steps):
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step)
        first = step * schedule.num_rows % (len(ids) - schedule.num_rows + 1)
        found = losses_of(head, target, ids[first : first + schedule.num_rows], guess_of)
        loss = sum(DECAY**depth * each for depth, (each, _) in enumerate(found))
        assert isinstance(loss, Tensor)
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 49 or step == schedule.steps - 1:
            shares = " ".join(f"{share.item():.3f}" for _, share in found)
            seconds = time.monotonic() - started
            print(
                f"step {step + 1} loss {loss.item():.3f} right {shares} {seconds:.0f} s", flush=True
            )


def save(head: Head, target: Target, tokens: Tensor, out: Path) -> None:
    """Writes config.json and the weights, rounded to bf16."""
    config = target.model.config
    out.mkdir(parents=True, exist_ok=True)
    values = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": DRAFT_VOCAB_SIZE,
        "dtype": "bfloat16",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS)},
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": INTERMEDIATE_SIZE,
        "max_position_embeddings": config.max_position_embeddings,
        "model_type": "llama",
        "num_attention_heads": NUM_HEADS,
        "num_hidden_layers": 1,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": config.vocab_size,
    }
    (out / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    tensors = {name: each.to(torch.bfloat16) for name, each in head.state_dict().items()}
    tensors["d2t"] = tokens - torch.arange(len(tokens))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


@torch.inference_mode()
def evaluate(head: Head, target: Target, ids: Tensor, guess_of: Tensor) -> list[float]:
    """Returns the share of right guesses of each draft."""
    parts = [losses_of(head, target, rows, guess_of) for rows in ids.split(4)]
    return [
        sum(part[depth][1].item() for part in parts) / len(parts) for depth in range(NUM_UNROLLED)
    ]


def make_head(
    model: Path,
    out: Path,
    *,
    seed: int = 7,
    steps: int = 800,
    rows: int = 4,
    documents: int = 16_000,
) -> None:
    """Trains a head for the model in a folder and writes it and its README to `out`."""
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    target = Target(model)
    ids, _ = pack(target.tokenizer, tiny_corpus.conversations(seed, documents, 0.25), 512)
    tokens = likeliest_tokens(target, ids[:200])
    guess_of = torch.full((target.model.config.vocab_size,), -1)
    guess_of[tokens] = torch.arange(len(tokens))
    head = Head(target.model.config.hidden_size)
    started = time.monotonic()
    train(head, target, ids, guess_of, Schedule(steps, rows, LEARNING_RATE))
    seconds = time.monotonic() - started
    save(head, target, tokens, out)
    others, _ = pack(target.tokenizer, tiny_corpus.conversations(seed + 1, 300, 0.25), 512)
    shares = evaluate(head, target, others[:32], guess_of)
    figures = [f"| {depth + 1} | {share:.1%} |" for depth, share in enumerate(shares)]
    text = README.format(
        model=DEFAULT_MODEL,
        out=DEFAULT_OUT,
        params=f"{sum(each.numel() for each in head.parameters()):,}",
        vocab=DRAFT_VOCAB_SIZE,
        all=target.model.config.vocab_size,
        figures="\n".join(figures),
        seed=seed,
        steps=steps,
        rows=rows,
        documents=documents,
        seconds=seconds,
        versions=f"Python {platform.python_version()}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}",
        sha256=hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest(),
    )
    (out / "README.md").write_text(text, encoding="utf-8")
    torch.use_deterministic_algorithms(False)
    print(*figures, sep="\n")


def main() -> None:
    """Parses the flags and trains."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=argparse.SUPPRESS)
    parser.add_argument(
        "--rows", type=int, default=argparse.SUPPRESS, help="rows of 512 tokens in a step"
    )
    parser.add_argument(
        "--documents", type=int, default=argparse.SUPPRESS, help="conversations to write"
    )
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    make_head(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
