"""Tiles that shrink on cards with less shared memory, and that Hopper has as they were measured."""

import pytest
import torch

from models.kernels.attention.configurations import prefill_tiles
from models.kernels.gpu import LEAST_SHARED_BYTES, gpu_of, is_hopper
from models.kernels.tuning.hopper import TABLES
from tests.support.gpu_facts import CARDS, forget_choices, generic_tables, properties_of

DEVICE = torch.device("cuda")
OTHERS = [card for card in CARDS if card != "H200"]
HEADS = [(dtype, dim) for dtype in (torch.bfloat16, torch.float32) for dim in (64, 128, 256)]


@pytest.fixture(autouse=True)
def _chooses_again():
    forget_choices()
    yield
    forget_choices()


def use(monkeypatch, card):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties_of(card))


def all_tiles():
    """Returns the tiles that depend on the card, and those of the tables, in pairs."""
    pytest.importorskip("triton")
    from models.kernels.attention.latent import expanded_attention
    from models.kernels.experts import moe_grouped
    from models.kernels.experts.fp8 import moe_fp8

    for has_prefix, table in {False: TABLES.first_chunk, True: TABLES.later_chunk}.items():
        for dtype, dim in HEADS:
            tiles = prefill_tiles(dtype, dim, has_prefix=has_prefix, device=DEVICE)
            yield tiles, table[dtype.itemsize, dim]
    for itemsize, tiles in TABLES.expanded.items():
        yield expanded_attention._tiles(itemsize, DEVICE), tiles
    for rows, both in TABLES.grouped_experts.items():
        for num_matrices, tiles in zip((2, 1), both, strict=True):
            fitting = moe_grouped._fitting(tiles, rows, 2, DEVICE, num_matrices=num_matrices)
            yield fitting, tiles
    for gate_up, down in (*TABLES.fp8_experts.values(), TABLES.fp8_experts_alone[0][1]):
        yield moe_fp8._fitting(gate_up, 1, DEVICE, num_matrices=2), gate_up
        yield moe_fp8._fitting(down, 2, DEVICE, num_matrices=1), down


def test_hopper_has_the_tiles_that_were_measured(monkeypatch):
    use(monkeypatch, "H200")
    assert all(tiles == measured for tiles, measured in all_tiles())


@pytest.mark.parametrize("card", OTHERS)
def test_other_cards_have_no_more_keys_nor_stages(monkeypatch, card):
    use(monkeypatch, card)
    pairs = list(all_tiles())
    for tiles, measured in pairs:
        assert 1 <= tiles.num_stages <= measured.num_stages
        assert 16 <= getattr(tiles, "keys", 16) <= getattr(measured, "keys", 16)
    if CARDS[card].shared_bytes == LEAST_SHARED_BYTES:
        assert any(tiles != measured for tiles, measured in pairs)


@pytest.mark.parametrize("card", OTHERS)
@pytest.mark.parametrize(("dtype", "dim"), HEADS, ids=str)
@pytest.mark.parametrize("has_prefix", [False, True])
def test_keys_of_chunks_fit_shared_memory(monkeypatch, card, dtype, dim, has_prefix):
    use(monkeypatch, card)
    tiles = prefill_tiles(dtype, dim, has_prefix=has_prefix, device=DEVICE)
    key_bytes = 2 * tiles.num_stages * tiles.keys * dim * dtype.itemsize
    weights = tiles.rows * tiles.keys * dtype.itemsize
    assert key_bytes + weights <= CARDS[card].shared_bytes


@pytest.mark.parametrize(("card", "most"), [("H200", 64), ("A100", 64), ("L40S", 32)])
def test_heads_of_latents_are_as_many_as_fit(monkeypatch, card, most):
    pytest.importorskip("triton")
    from models.kernels.attention.latent.latent_attention import _most_heads

    use(monkeypatch, card)
    assert _most_heads(512, 64, 2, DEVICE) == most


def test_a_hopper_gpu_can_count_as_one_without_tables(monkeypatch):
    use(monkeypatch, "H200")
    monkeypatch.setattr("models.kernels.gpu.has_kernels", lambda device: True)
    assert is_hopper(DEVICE)
    with generic_tables():
        assert not is_hopper(DEVICE)
        assert gpu_of(DEVICE).shared_bytes == LEAST_SHARED_BYTES
        assert any(tiles != measured for tiles, measured in all_tiles())
    assert is_hopper(DEVICE)
    assert all(tiles == measured for tiles, measured in all_tiles())
