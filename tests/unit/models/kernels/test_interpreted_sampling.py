"""The sampling kernels in Triton's interpreter, on the CPU; in a process of their own."""

import pytest

from tests.support.programs import run_interpreted

PROGRAM = """
import torch
torch.set_num_threads(1)
from models.kernels.sampling.step_tokens import choose_greedily
from tests.support.sampling_kernels import *

for vocab_size in (1, 7, 127, 5000):
    for dtype in DTYPES:
        check_sampling(random_logits(3, vocab_size, dtype), first=vocab_size)
        check_logprobs(3, vocab_size, dtype, num_top=5)
    check_penalties(3, vocab_size)
check_sampling(random_logits(len(PARAMS), 5000, torch.float32))
check_sampling(random_logits(2, 32000, torch.float32), first=11)
check_limits()
for logits in odd_logits(300).values():
    check_sampling(logits)
check_sampling(odd_logits(20000)["all tied"][:3], first=2)
for value in (torch.nan, torch.inf, -torch.inf):
    logits = torch.full((len(PARAMS), 300), value)
    assert (drawn_by_kernel(logits, mixed_choice(len(PARAMS))) == -1).all()
    logits[1:] = 0
    logits[1, 7] = 1
    tokens, rows, positions = (torch.ones(2, 3).int(), *torch.tensor([[0, 1], [0, 2]]).int())
    assert choose_greedily(logits[:2], tokens, rows, positions).tolist() == [-1, 7]
    assert tokens.tolist() == [[0, 1, 1], [1, 1, 7]]
for vocab_size in (1, 33, 5000):
    check_masks(4, vocab_size)
for num_top in (0, 1, 20):
    check_logprobs(2, 5000, torch.bfloat16, num_top=num_top)
"""


@pytest.mark.slow
def test_sampling_kernels_agree_with_the_references_in_the_interpreter():
    run_interpreted(PROGRAM)
