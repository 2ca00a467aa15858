import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.ops.sampling.uniform import uniform

INT64 = st.integers(-(2**63), 2**63 - 1)


def splitmix64(state: int) -> int:
    """The published generator's output function on unsigned integers."""
    mask = 2**64 - 1
    state = (state + 0x9E3779B97F4A7C15) & mask
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return state ^ (state >> 31)


@settings(max_examples=200, deadline=None)
@given(INT64, st.integers(0, 2**31 - 1))
def test_numbers_are_those_of_splitmix64_started_at_a_mixed_seed(seed, position):
    start = splitmix64(seed % 2**64) + (position - 1) * 0x9E3779B97F4A7C15
    expected = (splitmix64(start % 2**64) >> 16) / 2**48
    drawn = uniform(torch.tensor([seed]), torch.tensor([position], dtype=torch.int32))
    assert drawn.item() == expected
    assert 0 <= expected < 1


def test_the_first_published_output_of_seed_1234567_is_met():
    assert splitmix64(1234567) == 6457827717110365317


def test_numbers_are_even_over_positions_and_over_neighbouring_seeds():
    count, bins = 20_000, 50
    index = torch.arange(count)
    for seeds, positions in ((torch.full((count,), 7), index), (index, torch.full((count,), 3))):
        observed = torch.histc(uniform(seeds, positions).float(), bins, 0, 1)
        chi_square = ((observed - count / bins) ** 2 / (count / bins)).sum()
        assert chi_square < 100  # 49 degrees of freedom: exceeded with probability 2e-5


def test_neighbouring_seeds_do_not_repeat_each_other_at_an_offset():
    index = torch.arange(1000)
    rows = [uniform(torch.full_like(index, seed), index) for seed in range(4)]
    assert len(torch.cat(rows).unique()) == 4000
