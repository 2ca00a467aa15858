"""Times sampling, penalties and log-probabilities against torch and against reading the logits.

    python -m tests.bench.sampling [--json out.json]

Each figure is the median of replays of a graph of several launches. Logits are spread as those of
a language model: a broad body far below a few likely tokens. The floor is one read of the logits
at 4,482 GB/s, as measured on an H200. torch is what these steps take with its own operations: a
softmax and `multinomial`, `topk` or `sort` before them where the parameters truncate, a log-softmax
with `topk` for log-probabilities.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from models.ops.sampling.penalize_tokens import Penalties, penalize_tokens
from models.ops.sampling.top_logprobs import top_logprobs
from services.engine.sampling.sampler import sample
from tests.bench.kernels import BYTES_PER_US, microseconds
from tests.support.sampling_rows import token_choice

VOCAB_SIZE = 151_936
NUM_ROWS = (1, 8, 64, 256, 512)
HISTORY = 2048
CASES: dict[str, dict[str, float]] = {
    "temperature": {"temperature": 0.8},
    "top-k 20, top-p .95": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "top-p .95": {"top_p": 0.95},
    "min-p .05": {"min_p": 0.05},
    "greedy": {"temperature": 0.0},
}


def model_logits(num_rows: int) -> Tensor:
    """Returns logits with a normal body, 30 likely tokens and a few much likelier ones."""
    generator = torch.Generator("cuda").manual_seed(0)
    logits = 2.5 * torch.randn(num_rows, VOCAB_SIZE, generator=generator, device="cuda")
    likely = torch.randint(0, VOCAB_SIZE, (num_rows, 30), generator=generator, device="cuda")
    heights = 20 - 0.3 * torch.arange(30.0, device="cuda").expand(num_rows, -1)
    return logits.scatter_(1, likely, heights)


def torch_sample(logits: Tensor, params: dict[str, float]) -> Tensor:
    """Returns draws with torch's operations; all rows have the same parameters."""
    if params.get("temperature") == 0:
        return logits.argmax(-1)
    scaled = logits / params.get("temperature", 1.0)
    ids = None
    if params.get("top_k"):
        scaled, ids = scaled.topk(int(params["top_k"]), dim=-1)
    elif params.get("top_p", 1) < 1:
        scaled, ids = scaled.sort(dim=-1, descending=True)
    shares = scaled.softmax(-1)
    if params.get("top_p", 1) < 1:
        shares = shares.masked_fill(shares.cumsum(-1) - shares >= params["top_p"], 0)
    if params.get("min_p"):
        shares = shares.masked_fill(shares < params["min_p"] * shares.amax(-1, True), 0)
    # An exponential race: what `multinomial` does, without its check that waits for the device.
    drawn = (shares / torch.empty_like(shares).exponential_()).argmax(-1, keepdim=True)
    return drawn if ids is None else ids.gather(-1, drawn)


def torch_logprobs(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Returns log-probabilities with torch's operations."""
    logprobs = logits.log_softmax(-1)
    return logprobs.gather(-1, tokens[:, None]), logprobs.topk(20, dim=-1).values


def penalties_of(num_rows: int) -> Penalties:
    """Returns penalties on histories of HISTORY tokens."""
    return Penalties(
        tokens=torch.randint(0, VOCAB_SIZE, (num_rows, HISTORY), device="cuda").int(),
        row_ids=torch.arange(num_rows, device="cuda", dtype=torch.int32),
        seq_lens=torch.full((num_rows,), HISTORY, device="cuda", dtype=torch.int32),
        num_prompt_tokens=torch.full((num_rows,), HISTORY // 2, device="cuda"),
        repetition=torch.full((num_rows,), 1.0001, device="cuda"),
        frequency=torch.full((num_rows,), 1e-4, device="cuda"),
        presence=torch.full((num_rows,), 1e-4, device="cuda"),
    )


def torch_penalties(logits: Tensor, penalties: Penalties) -> Tensor:
    """Returns penalised logits with torch's operations: two scatters over the vocabulary."""
    history = penalties.tokens.long()
    ones = torch.ones(history.shape, device="cuda")
    seen = torch.zeros_like(logits).scatter_add_(1, history, ones) > 0
    half = HISTORY // 2
    counts = torch.zeros_like(logits).scatter_add_(1, history[:, half:], ones[:, half:])
    rate = penalties.repetition[:, None]
    logits = torch.where(seen, torch.where(logits > 0, logits / rate, logits * rate), logits)
    logits = logits - penalties.frequency[:, None] * counts
    return logits - penalties.presence[:, None] * (counts > 0)


def jobs(num_rows: int) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """Returns our call and torch's, by name."""
    logits = model_logits(num_rows)
    tokens = logits.argmax(-1)
    found: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {}
    for name, params in CASES.items():
        choice = token_choice([params | {"seed": i} for i in range(num_rows)], device="cuda")
        found[name] = (
            lambda choice=choice: sample(logits, choice),
            lambda params=params: torch_sample(logits, params),
        )
    mixed = [list(CASES.values())[i % len(CASES)] | {"seed": i} for i in range(num_rows)]
    choice = token_choice(mixed, device="cuda")
    found["all of these"] = (
        lambda: sample(logits, choice),
        lambda: torch_sample(logits, CASES["top-p .95"]),
    )
    flat = torch.randn(num_rows, VOCAB_SIZE, device="cuda")
    wide = token_choice([{"top_p": 0.95, "seed": i} for i in range(num_rows)], device="cuda")
    found["top-p .95, flat"] = (
        lambda: sample(flat, wide),
        lambda: torch_sample(flat, CASES["top-p .95"]),
    )
    found["log-probabilities"] = (
        lambda: top_logprobs(logits, tokens, 20),
        lambda: torch_logprobs(logits, tokens),
    )
    penalties, indices = penalties_of(num_rows), torch.arange(num_rows, device="cuda")
    found["penalties"] = (
        lambda: penalize_tokens(logits, indices, penalties),
        lambda: torch_penalties(logits, penalties),
    )
    return found


def run() -> list[dict[str, object]]:
    """Prints and returns one entry per case and batch."""
    results: list[dict[str, object]] = []
    for num_rows in NUM_ROWS:
        floor = num_rows * VOCAB_SIZE * 4 / BYTES_PER_US
        for name, (ours, theirs) in jobs(num_rows).items():
            ours_us, torch_us = microseconds([ours] * 4), microseconds([theirs] * 2)
            torch.cuda.empty_cache()
            results.append(
                {
                    "case": name,
                    "rows": num_rows,
                    "us": ours_us,
                    "torch_us": torch_us,
                    "floor_us": floor,
                }
            )
            print(
                f"{name:20} {num_rows:4} rows {ours_us:9.2f} us  torch {torch_us:9.2f}  "
                f"floor {floor:7.2f}  x{ours_us / floor:.2f}",
                flush=True,
            )
    return results


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = run()
    if arguments.json:
        record = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "results": results,
        }
        arguments.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
