"""Memory that all ranks write into."""

from models.kernels.ranks.rank_memory import addresses_in


def test_slots_inside_a_larger_buffer_are_found_on_all_ranks():
    assert addresses_in([4096, 65536], 1, 65536 + 512) == (4096 + 512, 65536 + 512)


def test_slots_at_the_start_of_a_buffer_are_found_there():
    assert addresses_in([4096, 65536], 0, 4096) == (4096, 65536)
