"""Attention of one query at a time on a CPU: see models.batch_invariance."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from models.forward_context import AttentionGroup


def queries_alone(
    q: torch.Tensor, groups: Sequence[AttentionGroup], block_size: int
) -> Iterator[tuple[torch.Tensor, AttentionGroup]]:
    """Yields each query of some groups, with the group that it would be alone.

    Such a group has exactly the blocks of the keys that the query sees: its shapes depend on the
    query's position and on nothing else.

    Args:
        q: [T, ...], of the step.
        groups: of the step.
        block_size: tokens in one block.
    """
    for group in groups:
        tables = group.block_ids.view(group.num_requests, -1)
        num_seen = group.mask[:, 0].sum(-1).tolist()
        token = group.first_token
        for table, counts in zip(tables, num_seen, strict=True):
            for count in counts:
                num_blocks = -(-count // block_size)
                keys = torch.arange(num_blocks * block_size, device=q.device)
                alone = replace(
                    group,
                    first_token=token,
                    num_requests=1,
                    num_queries=1,
                    block_ids=table[:num_blocks],
                    mask=(keys < count)[None, None, None],
                )
                # A copy, as torch may compute otherwise at another alignment.
                yield q[token : token + 1].clone(), alone
                token += 1
