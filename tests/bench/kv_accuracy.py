"""How far a KV cache of 8 bits moves a model's logits.

    python -m tests.bench.kv_accuracy [--model FOLDER | --shape NAME] [--json out.json]

The same tokens go through the same model twice, in one chunk and then one by one, with a cache in
the model's dtype and with one of fp8_e4m3; each position's logits are compared. A checkpoint gets
chats and texts, each continued by the model itself; a shape gets random weights and random tokens.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import AutoTokenizer

from models.kv_cache import FP8_CACHE_DTYPE
from models.layers.decoder import CausalLM
from models.loading.loader import load_model
from services.engine.config.checkpoint import TINY_CHECKPOINT
from tests.bench.model_folder import make_model_folder, shape_names
from tests.bench.report import Report
from tests.support.paged_runner import PagedRunner
from tests.support.varied_prompts import varied_prompts

BLOCK_SIZE = 16
MAX_PROMPT_TOKENS = 256


def prompts(folder: Path, count: int) -> list[list[int]]:
    """Returns prompts of every kind in a model's tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sequences = []
    for text, is_chat in varied_prompts(count):
        if is_chat:
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
            )
        prompt = tokenizer(text, add_special_tokens=not is_chat)["input_ids"]
        sequences.append(prompt[:MAX_PROMPT_TOKENS])
    return sequences


def texts(folder: Path, model: CausalLM, count: int, num_tokens: int) -> list[list[int]]:
    """Returns prompts of every kind, each with the model's greedy continuation."""
    sequences = prompts(folder, count)
    for sequence in sequences:
        runner = make_runner(model, len(sequence) + num_tokens)
        state = runner.add(sequence)
        for _ in range(num_tokens):
            logits = runner.run(state, len(state.token_ids))
            sequence.append(int(logits[-1].argmax()))
            state.token_ids.append(sequence[-1])
    return sequences


def random_tokens(model: CausalLM, count: int, num_tokens: int) -> list[list[int]]:
    """Returns sequences of random tokens."""
    generator = torch.Generator().manual_seed(0)
    shape = (count, num_tokens)
    return torch.randint(model.config.vocab_size, shape, generator=generator).tolist()


def make_runner(
    model: CausalLM, num_tokens: int, cache_dtype: torch.dtype | None = None
) -> PagedRunner:
    """Returns a runner for one sequence."""
    return PagedRunner(
        model,
        num_blocks=2 + num_tokens // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        num_rows=1,
        device=model.lm_head.weight.device,
        cache_dtype=cache_dtype,
    )


def run(
    model: CausalLM, token_ids: list[int], num_single: int, cache_dtype: torch.dtype | None
) -> torch.Tensor:
    """Returns the logits of a sequence whose last tokens come one by one: [T, V] float32."""
    runner = make_runner(model, len(token_ids), cache_dtype)
    sequence = runner.add(token_ids)
    logits = runner.step([(sequence, len(token_ids) - num_single)])
    for _ in range(num_single):
        logits += runner.step([(sequence, 1)])
    return torch.cat(logits).float()


def compare(expected: torch.Tensor, actual: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns figures of each position, [T], of logits [T, V] against those expected."""
    log_p, log_q = expected.log_softmax(-1), actual.log_softmax(-1)
    return {
        "relative error": (actual - expected).norm(dim=-1) / expected.norm(dim=-1),
        "KL divergence": (log_p.exp() * (log_p - log_q)).sum(-1),
        "equal greedy tokens": (actual.argmax(-1) == expected.argmax(-1)).float(),
    }


def measure(model: CausalLM, sequences: list[list[int]], num_single: int, report: Report) -> None:
    """Compares both caches on all sequences."""
    found: dict[str, list[torch.Tensor]] = {}
    for token_ids in sequences:
        own, fp8 = (run(model, token_ids, num_single, kind) for kind in (None, FP8_CACHE_DTYPE))
        for name, values in compare(own, fp8).items():
            found.setdefault(name, []).append(values.cpu())
    figures = {name: torch.cat(values) for name, values in found.items()}
    report.state("positions", sum(map(len, sequences)))
    for name, unit in (("relative error", "ratio"), ("KL divergence", "nats")):
        report.add(f"{name}, mean", [float(figures[name].mean())], unit)
        report.add(f"{name}, largest", [float(figures[name].max())], unit)
    name = "equal greedy tokens"
    report.add(name, [float(figures[name].mean())], "share", "higher")


def main() -> None:
    """Measures what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=TINY_CHECKPOINT)
    parser.add_argument("--shape", choices=shape_names(), help="random weights of this shape")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32, help="continued, or random ones in all")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    names = ("device", "dtype", "sequences", "tokens")
    settings = {name: getattr(arguments, name) for name in names}
    report = Report(
        "kv_accuracy", path=arguments.json, shape=arguments.shape or "", settings=settings
    )
    place = {
        "device": torch.device(arguments.device),
        "dtype": getattr(torch, arguments.dtype),
    }
    if arguments.shape is None:
        model = load_model(arguments.model, **place)
        sequences = texts(arguments.model, model, arguments.sequences, arguments.tokens)
    else:
        with tempfile.TemporaryDirectory() as parent:
            folder = make_model_folder(arguments.shape, Path(parent))
            model = load_model(folder, **place, load_format="dummy")
        sequences = random_tokens(model, arguments.sequences, arguments.tokens)
    measure(model, sequences, arguments.tokens // 2, report)
    print(report.table())


if __name__ == "__main__":
    main()
