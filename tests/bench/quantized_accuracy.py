"""Measures how far each format of weights, and a cache of 8 bits, moves the embedded model.

Example: python -m tests.bench.quantized_accuracy
"""

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoTokenizer

from models.kv_cache import FP8_CACHE_DTYPE
from models.layers.decoder import CausalLM
from models.loading.loader import load_model
from scripts.quantize_tiny import FORMATS, TINY, write_quantized
from tests.support.paged_runner import PagedRunner
from tests.support.varied_prompts import varied_prompts

CPU = torch.device("cpu")
Logits = list[torch.Tensor]


def read_prompts(count: int) -> list[list[int]]:
    """Returns token ids of texts."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    texts = (text for text, _ in varied_prompts(count))
    return [tokenizer.encode(text)[:256] or [0] for text in texts]


def compute_logits(
    model: CausalLM, prompts: list[list[int]], cache_dtype: torch.dtype = torch.float32
) -> Logits:
    """Returns the logits of every token of every prompt, in float32."""
    results = []
    for prompt in prompts:
        runner = PagedRunner(model, block_size=16, cache_dtype=cache_dtype)
        results.append(runner.run(runner.add(list(prompt)), 512).float())
    return results


def load(folder: Path, **options: object) -> CausalLM:
    """Loads a model in float32 on the CPU."""
    return load_model(folder, device=CPU, dtype=torch.float32, **options)  # type: ignore[arg-type]


def compare(found: Logits, expected: Logits) -> str:
    """Returns relative error, KL divergence in nats a token, and agreement of greedy tokens."""
    ours, truth = torch.cat(found), torch.cat(expected)
    error = (ours - truth).norm() / truth.norm()
    divergence = torch.nn.functional.kl_div(
        ours.log_softmax(-1), truth.log_softmax(-1), log_target=True, reduction="batchmean"
    )
    agreement = (ours.argmax(-1) == truth.argmax(-1)).float().mean()
    return f"{error:.4f} | {divergence:.5f} | {100 * agreement:.1f} %"


def measure(num_prompts: int) -> Iterator[str]:
    """Yields a row of a table for each format."""
    prompts = read_prompts(num_prompts)
    plain = load(TINY)
    truth = compute_logits(plain, prompts)
    rounded = load(TINY, rounds_to_fp8=True, keep_quantized=True)
    for name, model, cache_dtype in (
        ("plain, cache fp8_e4m3", plain, FP8_CACHE_DTYPE),
        ("--quantization fp8, activations rounded", rounded, torch.float32),
        ("the same, cache fp8_e4m3", rounded, FP8_CACHE_DTYPE),
    ):
        yield f"{name} | {compare(compute_logits(model, prompts, cache_dtype), truth)}"
    for name, form in FORMATS.items():
        with tempfile.TemporaryDirectory() as folder:
            write_quantized(TINY, Path(folder), form)
            yield f"{name} | {compare(compute_logits(load(Path(folder)), prompts), truth)}"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-prompts", type=int, default=16)
    print("| format | relative error of logits | KL, nats | same greedy token |\n|---|---|---|---|")
    for row in measure(parser.parse_args().num_prompts):
        print(f"| {row} |", flush=True)


if __name__ == "__main__":
    main()
