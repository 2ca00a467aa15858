"""Reference of the gated delta rule: a token at a time, and in chunks.

Source: Yang et al. 2024, "Gated Delta Networks" (arXiv 2412.06464); with a decay of each channel of
the keys, Kimi Team 2025, "Kimi Linear" (arXiv 2510.26692).
"""

import torch


def delta_step(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the state after a token, and the token's output [..., H, V].

    All are float32. state: [..., H, K, V]. q, k: [..., H, K]. v: [..., H, V]. log_decay: [..., H,
    K or 1]. beta: [..., H, 1], the share of the old value that the new one replaces.
    """
    state = state * log_decay.exp().unsqueeze(-1)
    old = (k.unsqueeze(-2) @ state).squeeze(-2)
    state = state + k.unsqueeze(-1) * (beta * (v - old)).unsqueeze(-2)
    return state, (q.unsqueeze(-2) @ state).squeeze(-2)


def delta_chunk(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the state after a chunk of C tokens, and their outputs [H, C, V].

    All are float32. state: [H, K, V]. q, k: [H, C, K]. v: [H, C, V]. log_decay: [H, C, K or 1].
    beta: [H, C, 1].
    """
    total = log_decay.cumsum(1)
    size = q.shape[1]
    is_later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    # Decays between tokens i and j, [H, C, C, K or 1]; masked first, as they grow for j after i.
    between = (total.unsqueeze(2) - total.unsqueeze(1)).masked_fill(is_later[..., None], -torch.inf)
    decay = between.exp()
    old_by_new, seen = (_products(x, k, decay) for x in (beta * k, q))
    decayed = total.exp()
    right = torch.cat((beta * v, beta * decayed * k), dim=-1)
    solved = torch.linalg.solve_triangular(old_by_new, right, upper=False, unitriangular=True)
    new, of_state = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    new = new - of_state @ state
    output = (decayed * q) @ state + seen @ new
    left = (total[:, -1:] - total).exp()
    state = decayed[:, -1].unsqueeze(-1) * state + (left * k).transpose(1, 2) @ new
    return state, output


def _products(x: torch.Tensor, k: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """Returns products of x and k, each [H, C, K], with decays of heads or channels: [H, C, C]."""
    if decay.shape[-1] == 1:
        return x @ k.transpose(1, 2) * decay.squeeze(-1)
    return torch.einsum("hik,hjk,hijk->hij", x, k, decay)
