"""Reference of linear attention whose state decays: a token at a time, and in chunks.

The state S of a head sums keys times values: S <- e^g S + k v; o = q^T S.

Source: Dao and Gu 2024, "Transformers are SSMs" (arXiv 2405.21060), section 6; Qin et al. 2024,
"Lightning Attention-2" (arXiv 2401.04658).
"""

import torch


def decayed_step(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the state after a token, and the token's output [..., H, V].

    All are float32. state: [..., H, K, V]. q, k: [..., H, K]. v: [..., H, V]. log_decay: [..., H,
    1].
    """
    state = state * log_decay.exp().unsqueeze(-1) + k.unsqueeze(-1) * v.unsqueeze(-2)
    return state, (q.unsqueeze(-2) @ state).squeeze(-2)


def decayed_chunk(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the state after a chunk of C tokens, and their outputs [H, C, V].

    All are float32. state: [H, K, V]. q, k: [H, C, K]. v: [H, C, V]. log_decay: [H, C, 1].
    """
    total = log_decay.cumsum(1)
    size = q.shape[1]
    is_later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    decay = (total - total.transpose(1, 2)).masked_fill(is_later, -torch.inf).exp()
    output = (q @ k.transpose(1, 2) * decay) @ v + (total.exp() * q) @ state
    left = (total[:, -1:] - total).exp()
    state = total[:, -1:].exp() * state + (left * k).transpose(1, 2) @ v
    return state, output
