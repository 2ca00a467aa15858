from dataclasses import replace

import pytest
import torch

from models.forward_context import forward_context
from models.kernels.attention.latent import latent_forms
from models.kernels.attention.latent.latent_forms import NEVER
from models.ops.attention import latent_attention
from models.ops.attention.kv_cache import quantize_heads
from tests.support.latent_case import make_latent_case

SIZES = {"num_heads": 3, "latent_dim": 10, "rope_dim": 4}


def attended(case, token, entries):
    """Returns a token's attention to entries with the keys and values that their heads make."""
    queries, latent, heads = case.queries, entries[:, :10], []
    for head, rows in enumerate(queries.projections.chunk(3)):
        keys = torch.cat((latent @ rows[:16].T, entries[:, 10:]), dim=1)
        query = torch.cat((queries.plain[token, head], queries.rotated[token, head]))
        heads.append((keys @ query * case.scale).softmax(0) @ (latent @ rows[16:].T))
    return torch.stack(heads)


def cached_entries(case, blocks):
    """Returns what the cache has in some blocks, latent elements first."""
    tensors = case.cache.tensors()
    return torch.cat([tensors[name][blocks].flatten(0, 1) for name in ("latent", "rotated")], -1)


@pytest.mark.parametrize("least", [1, 5, NEVER])
@pytest.mark.parametrize(
    "batch", [([1, 1, 1], [5, 17, 1]), ([4, 1, 6], [9, 3, 6]), ([30, 2], [75, 40])]
)
def test_every_query_attends_to_the_tokens_up_to_its_own_in_both_forms(batch, least, monkeypatch):
    monkeypatch.setattr(latent_attention, "least_expanded_queries", lambda sizes: least)
    # Pieces of two blocks: 3 heads of 32 float32.
    monkeypatch.setattr(latent_forms, "MOST_EXPANDED_BYTES", 2 * 16 * 3 * 32 * 4)
    case = make_latent_case(*batch, **SIZES)
    output = case.run()
    token = 0
    for request, (num_queries, seq_len) in enumerate(zip(*batch, strict=True)):
        blocks = case.metadata.block_tables[request].tolist()
        cached = cached_entries(case, blocks)
        for position in range(seq_len - num_queries, seq_len):
            keys = cached[: position + 1]
            torch.testing.assert_close(output[token], attended(case, token, keys))
            token += 1


@pytest.mark.parametrize("top_k", [1, 4, 50])
def test_with_an_index_queries_attend_to_the_tokens_of_the_highest_scores(top_k):
    case = make_latent_case([4, 1], [9, 17], **SIZES, top_k=top_k)
    output = case.run()
    index_q, weights = case.index.q, case.index.weights
    token = 0
    for request, (num_queries, seq_len) in enumerate(((4, 9), (1, 17))):
        blocks = case.metadata.block_tables[request].tolist()
        cached = cached_entries(case, blocks)
        index_keys = torch.cat([case.cache.index_keys[block] for block in blocks])
        for position in range(seq_len - num_queries, seq_len):
            seen = index_keys[: position + 1]
            scores = (weights[token, :, None] * (index_q[token] @ seen.T).relu()).sum(0)
            chosen = scores.topk(min(top_k, position + 1)).indices
            keys = cached[chosen]
            torch.testing.assert_close(output[token], attended(case, token, keys))
            token += 1


@pytest.mark.parametrize("top_k", [None, 3])
def test_given_a_rotation_the_operator_does_what_those_before_it_did(top_k):
    case = make_latent_case([4, 1], [9, 17], **SIZES, top_k=top_k, has_transform=True)
    separate = case.transformed()
    assert torch.equal(case.run(), separate.run())
    for name, tensor in separate.cache.tensors().items():
        assert torch.equal(case.cache.tensors()[name], tensor)


@pytest.mark.parametrize("least", [1, NEVER])
@pytest.mark.parametrize("top_k", [None, 4])
def test_with_a_cache_of_8_bits_queries_attend_to_dequantised_entries(top_k, least, monkeypatch):
    monkeypatch.setattr(latent_attention, "least_expanded_queries", lambda sizes: least)
    case = make_latent_case([4, 1], [9, 17], **SIZES, top_k=top_k, has_fp8_cache=True)
    output = case.run()
    exact = case.exact_reading().run()
    torch.testing.assert_close(output.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 1e-3, 100.0])
def test_a_latent_vector_of_8_bits_is_as_exact_with_a_scale_a_token_as_with_four(scale):
    gains = torch.randn(512, generator=torch.Generator().manual_seed(0)).mul(0.3).exp()
    case = make_latent_case(
        [200], [200], num_heads=1, latent_dim=512, rope_dim=64, has_fp8_cache=True
    )
    latent = case.entries.latent * gains * scale
    case = replace(case, entries=replace(case.entries, latent=latent))
    case.run()
    slots = case.metadata.slot_mapping
    stored, scales = (x.flatten(0, 1)[slots] for x in (case.cache.latent, case.cache.latent_scale))
    by_token = (stored.float() * scales[:, None] - latent).norm() / latent.norm()
    quarters, quarter_scales = quantize_heads(latent.view(-1, 4, 128))
    dequantised = quarters.float() * quarter_scales.unsqueeze(-1)
    by_quarter = (dequantised.flatten(1) - latent).norm() / latent.norm()
    assert by_token < 0.0265
    assert by_token < 1.05 * by_quarter


@pytest.mark.parametrize("top_k", [5, 200])
def test_a_sink_takes_its_share_of_a_softmax(top_k):
    case = make_latent_case([4, 1], [9, 17], **SIZES, top_k=top_k, has_sinks=True).exact()
    output = case.run()
    faint = replace(case, sinks=torch.full_like(case.sinks, -1e4)).run()
    plain = replace(case, sinks=None).run()
    torch.testing.assert_close(faint, plain)
    # Sinks of equal heads differ by their logarithms: twice the weight, and so on.
    weights = [(faint / replace(case, sinks=case.sinks + shift).run()) - 1 for shift in (0.0, 1.0)]
    torch.testing.assert_close(weights[1], weights[0] * torch.e)
    assert (output.norm(dim=-1) < plain.norm(dim=-1)).all()


@pytest.mark.parametrize("has_transform", [False, True])
@pytest.mark.parametrize("top_k", [None, 3])
def test_operator_passes_torchs_own_checks(top_k, has_transform):
    case = make_latent_case(
        [5, 1], [5, 9], **SIZES, top_k=top_k, has_transform=has_transform,
        has_sinks=top_k is not None,
    )  # fmt: skip
    with forward_context(case.context()):
        torch.library.opcheck(
            torch.ops.octavo.latent_attention_with_output.default,
            case.arguments(torch.zeros(6, 3, 16)),
        )
