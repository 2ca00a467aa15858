"""How parts of unequal sequences are dealt to programs, in Triton's interpreter."""

import pytest

from tests.support.programs import run_interpreted

PROGRAM = """
import torch
from tests.support.dealt_parts import store_parts

CASES = [
    ([64_000] + [500] * 100, 0, 32, 64, 1024),
    ([500] * 10 + [64_000], 0, 64, 16, 256),
    ([300] * 24, 0, 32, 64, 256),
    ([16_000] + [500] * 7, 0, 32, 64, 128),
    ([0, 1, 2, 129, 130, 5000, 0], 0, 8, 64, 128),
    ([40] * 255 + [9000, 1, 9000], 0, 16, 16, 64),
    ([5000, 3, 900, 901, 902], 901, 16, 32, 32),
    ([100] * 5, 0, 64, 64, 1024),
    ([2**30] * 5, 0, 16, 64, 64),
    ([0] * 3, 0, 8, 64, 64),
    ([100_000, 5, 5], 0, 1, 64, 64),
]

def check(seq_lens, num_tokens, window, dealt, keys_of_tile, least, only_single, has_new, even):
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    starts = torch.tensor([0, *num_tokens], dtype=torch.int32).cumsum(0).int()
    out = torch.full((dealt + len(lengths), 5), -1, dtype=torch.int32)
    store_parts[(len(out),)](
        out, lengths, starts, len(lengths), window, dealt, keys_of_tile, least, only_single,
        has_new, even,
    )
    computed, first_results = {}, {}
    for request, split, part, active, num_before in out.tolist():
        if split < active:
            assert (request, split) not in computed
            computed[request, split] = part, active
            assert first_results.setdefault(request, num_before) == num_before
    taken = []
    for request, seq_len in enumerate(seq_lens):
        keys = max(0, min(seq_len, window or seq_len) - has_new)
        if num_tokens[request] != 1:
            keys = 0
        part, active = computed[request, 0]
        assert part % keys_of_tile == 0 or active == 1
        assert part >= least / 2 if even else part >= least
        if even and active > 1:
            assert keys - (active - 1) * part > part - active * keys_of_tile
        assert (active - 1) * part < max(keys, 1) <= active * part or active == 1 >= keys / least
        for split in range(active):
            assert computed.pop((request, split)) == (part, active)
        if active > 1:
            taken += range(first_results[request], first_results[request] + active)
    # Every part is someone's, and their results have places of their own.
    assert not computed
    assert len(set(taken)) == len(taken)
    assert all(0 <= each < 2 * dealt for each in taken)

for number, (seq_lens, *others) in enumerate(CASES):
    even = number % 2 == 1
    check(seq_lens, [1] * len(seq_lens), *others, True, True, even)
    # Chunks and absent requests between single tokens.
    mixed = [(1, 1, 7, 0)[(number + place) % 4] for place in range(len(seq_lens))]
    check(seq_lens, mixed, *others, False, False, not even)
"""


@pytest.mark.slow
def test_every_part_of_every_sequence_has_one_program_and_one_place():
    run_interpreted(PROGRAM)
