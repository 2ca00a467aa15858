"""Compares the sampling kernels with their references, on any device that runs them.

Triton is imported where a kernel is called: a machine without it collects the tests and skips them.
"""

import torch

from models.ops.sampling import penalize_tokens as penalties
from models.ops.sampling import sample_tokens as sampling
from models.ops.sampling import top_logprobs as logprobs
from services.engine.sampling.sampler import TokenChoice
from tests.support.sampling_rows import token_choice
from tests.support.token_masks import pack_bits

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PARAMS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"top_p": 0.7},
    {"min_p": 0.05, "temperature": 1.5},
    {"top_k": 3},
    {"top_p": 0.95, "min_p": 0.01},
    {"top_k": 200, "top_p": 0.5, "temperature": 3.0},
    {"temperature": 1e-40},
    {"top_p": 1e-30},
    {"top_k": 1},
    {"temperature": 30.0, "top_p": 0.999},  # more candidates than are gathered
    {"top_k": 10**6},
    {"top_k": 900, "temperature": 2.0},  # more than there are groups of tokens
    {"temperature": 0.05, "top_p": 0.5, "top_k": 500},
    {"min_p": 1.0},
    {"temperature": 100.0, "top_k": 2},
]


def random_logits(num_rows: int, vocab_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns logits spread as in real models, with ties in half precision."""
    generator = torch.Generator().manual_seed(vocab_size)
    return (4 * torch.randn(num_rows, vocab_size, generator=generator)).to(dtype)


def mixed_choice(num_rows: int, *, first: int = 0, device: str = "cpu") -> TokenChoice:
    """Returns rows of different parameters, from the `first` on."""
    rows = [
        PARAMS[(first + i) % len(PARAMS)] | {"seed": i * i * 7919 - 3, "position": i}
        for i in range(num_rows)
    ]
    return token_choice(rows, device=device)


def drawn_by_kernel(logits: torch.Tensor, choice: TokenChoice) -> torch.Tensor:
    """Returns the kernel's tokens."""
    from models.kernels.sampling import sample_tokens as sampling_kernel

    return sampling_kernel.sample_tokens(
        logits,
        choice.temperature,
        choice.top_k,
        choice.top_p,
        choice.min_p,
        choice.seeds,
        choice.positions,
    )


def check_sampling(logits: torch.Tensor, *, first: int = 0, device: str = "cpu") -> None:
    """Fails unless the kernel draws the tokens that the reference draws on the CPU."""
    expected = reference_tokens(logits, mixed_choice(len(logits), first=first))
    choice = mixed_choice(len(logits), first=first, device=device)
    drawn = drawn_by_kernel(logits.to(device), choice).cpu()
    assert torch.equal(drawn, expected), f"{logits.dtype} {logits.shape}: {drawn} for {expected}"


def check_limits(*, device: str = "cpu") -> None:
    """Fails unless each limit keeps the tokens that the reference keeps, drawn almost evenly."""
    rows = [
        limit | {"temperature": 100.0, "seed": seed}
        for limit in ({"top_k": 2}, {"top_p": 0.1}, {"top_k": 5, "top_p": 0.5}, {"min_p": 0.95})
        for seed in range(10)
    ]
    logits = random_logits(1, 40, torch.float32).repeat(len(rows), 1)
    drawn = drawn_by_kernel(logits.to(device), token_choice(rows, device=device)).cpu()
    assert torch.equal(drawn, reference_tokens(logits, token_choice(rows)))


def odd_logits(vocab_size: int) -> dict[str, torch.Tensor]:
    """Returns logits that no model should give, with a row for each of the parameters."""
    shape = (len(PARAMS), vocab_size)
    masked = torch.full(shape, -torch.inf)
    masked[:, vocab_size // 2] = -5.0
    few = torch.full(shape, -torch.inf)
    few[:, :: max(1, vocab_size // 9)] = 1.0
    return {
        "all tied": torch.zeros(shape),
        "one left": masked,
        "few left, tied": few,
        "in steps": torch.arange(vocab_size).remainder(37).float().expand(shape).contiguous() / 4,
        "all masked": torch.full(shape, -torch.inf),
    }


def reference_tokens(logits: torch.Tensor, choice: TokenChoice) -> torch.Tensor:
    """Returns the reference's tokens."""
    return sampling.sample_tokens(
        logits,
        temperature=choice.temperature,
        top_k=choice.top_k,
        top_p=choice.top_p,
        min_p=choice.min_p,
        seeds=choice.seeds,
        positions=choice.positions,
    )


def check_penalties(num_rows: int, vocab_size: int, *, device: str = "cpu") -> None:
    """Fails unless the kernel changes the same logits by the same bits as the reference."""
    from models.kernels.sampling import penalize_tokens as penalties_kernel

    generator = torch.Generator().manual_seed(vocab_size)
    logits = random_logits(num_rows + 2, vocab_size, torch.float32)
    logits[:, 1::7] = -torch.inf  # as biases forbid tokens before the penalties
    length = 2100
    indices = torch.randperm(num_rows + 2, generator=generator)[:num_rows]
    shape = (num_rows + 3, length)
    arguments = {
        "tokens": torch.randint(0, min(vocab_size, 700), shape, generator=generator).int(),
        "row_ids": torch.randperm(num_rows + 3, generator=generator)[:num_rows].int(),
        "seq_lens": torch.randint(1, length, (num_rows,), generator=generator).int(),
        "num_prompt_tokens": torch.randint(1, 900, (num_rows,), generator=generator),
        "repetition": torch.rand(num_rows, generator=generator) + 0.5,
        "frequency": torch.rand(num_rows, generator=generator) - 0.5,
        "presence": torch.rand(num_rows, generator=generator) - 0.5,
    }
    expected, changed = logits.clone(), logits.to(device, copy=True)
    penalties.penalize_tokens(expected, indices, penalties.Penalties(**arguments))
    penalties_kernel.penalize_tokens(
        changed, indices.to(device), *(value.to(device) for value in arguments.values())
    )
    assert torch.equal(changed.cpu(), expected), f"vocabulary of {vocab_size}"
    assert not torch.equal(logits, expected)


def check_logprobs(
    num_rows: int, vocab_size: int, dtype: torch.dtype, *, num_top: int, device: str = "cpu"
) -> None:
    """Fails unless the kernel names the same tokens with the same log-probabilities."""
    from models.kernels.sampling import top_logprobs as logprobs_kernel

    logits = random_logits(num_rows, vocab_size, dtype)
    tokens = torch.arange(num_rows) % vocab_size
    num_top = min(num_top, vocab_size)
    expected = logprobs.top_logprobs(logits, tokens, num_top)
    found = logprobs_kernel.top_logprobs(logits.to(device), tokens.to(device), num_top)
    chosen, ids, top = (each.cpu() for each in found)
    assert torch.equal(ids, expected[1]), f"{dtype} {vocab_size}: {ids} for {expected[1]}"
    torch.testing.assert_close(chosen, expected[0], rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(top, expected[2], rtol=1e-5, atol=2e-5)


def check_masks(num_rows: int, vocab_size: int, *, device: str = "cpu") -> None:
    """Compares the masking of half of the rows; the others must not change."""
    from models.kernels.sampling import mask_tokens as kernel

    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(num_rows, vocab_size, generator=generator).to(device)
    rows = torch.arange(num_rows - 1, -1, -2, dtype=torch.int32, device=device)
    is_allowed = torch.rand(len(rows), vocab_size, generator=generator) < 0.5
    expected = logits.cpu().clone()
    expected[rows.cpu().long()] = expected[rows.cpu().long()].masked_fill(~is_allowed, -torch.inf)
    kernel.mask_tokens(logits, rows, pack_bits(is_allowed).to(device))
    assert torch.equal(logits.cpu(), expected)
