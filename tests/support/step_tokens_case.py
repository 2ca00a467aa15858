"""Cases for the operators on a step's tokens, on any device."""

import torch


def table(num_rows: int, length: int, device: str) -> torch.Tensor:
    """Returns a table in which every token is another one."""
    return torch.arange(num_rows * length, dtype=torch.int32, device=device).view(num_rows, length)


def check_last_tokens(last_tokens, *, device: str) -> None:
    """Checks any order of rows, at any length."""
    tokens = table(300, 17, device)
    rows = torch.randperm(300, generator=torch.Generator().manual_seed(0))[:257].int().to(device)
    seq_lens = (torch.arange(257, device=device) % 17 + 1).int()
    input_ids = torch.full((257,), -1, dtype=torch.int32, device=device)
    positions = torch.full((257,), -1, device=device)
    last_tokens(tokens, rows, seq_lens, input_ids=input_ids, positions=positions)
    assert torch.equal(positions, seq_lens.long() - 1)
    assert torch.equal(input_ids, tokens[rows.long(), positions])


def check_choice(
    choose_greedily, num_rows: int, num_logits: int, *, dtype: torch.dtype, device: str
) -> None:
    """Checks that each row's largest logit is found and its token written, and nothing else."""
    generator = torch.Generator().manual_seed(num_rows * num_logits)
    logits = torch.randn(num_rows, num_logits, generator=generator).to(device, dtype)
    logits[0, -1] = 1000.0
    tokens = table(num_rows + 2, 5, device)
    rows = torch.arange(1, num_rows + 1, dtype=torch.int32, device=device).flip(0)
    positions = (torch.arange(num_rows, device=device) % 5).int()
    before = tokens.clone()
    chosen = choose_greedily(logits, tokens, rows, positions)
    assert chosen.dtype == torch.int32
    assert torch.equal(chosen.long(), _first_largest(logits))
    before[rows.long(), positions.long()] = chosen
    assert torch.equal(tokens, before)


def _first_largest(logits: torch.Tensor) -> torch.Tensor:
    is_largest = logits == logits.max(dim=-1, keepdim=True).values
    return is_largest.int().cpu().argmax(dim=-1).to(logits.device)
