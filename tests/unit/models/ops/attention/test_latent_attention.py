import pytest
import torch

from models.forward_context import forward_context
from tests.support.latent_case import make_latent_case

SIZES = {"num_heads": 3, "latent_dim": 10, "rope_dim": 4}


@pytest.mark.parametrize("batch", [([1, 1, 1], [5, 17, 1]), ([4, 1, 6], [9, 3, 6])])
def test_every_query_attends_to_the_latent_vectors_up_to_its_own(batch):
    case = make_latent_case(*batch, **SIZES)
    output = case.run()
    token = 0
    for request, (num_queries, seq_len) in enumerate(zip(*batch, strict=True)):
        blocks = case.metadata.block_tables[request].tolist()
        cached = torch.cat([case.cache.latent[block] for block in blocks])
        for position in range(seq_len - num_queries, seq_len):
            keys = cached[: position + 1]
            weights = (case.q[token] @ keys.T * case.scale).softmax(-1)
            torch.testing.assert_close(output[token], weights @ keys[:, :10])
            token += 1


@pytest.mark.parametrize("top_k", [1, 4, 50])
def test_with_an_index_queries_attend_to_the_tokens_of_the_highest_scores(top_k):
    case = make_latent_case([4, 1], [9, 17], **SIZES, top_k=top_k)
    output = case.run()
    index_q, _, weights, _ = case.index
    token = 0
    for request, (num_queries, seq_len) in enumerate(((4, 9), (1, 17))):
        blocks = case.metadata.block_tables[request].tolist()
        cached = torch.cat([case.cache.latent[block] for block in blocks])
        index_keys = torch.cat([case.cache.index_keys[block] for block in blocks])
        for position in range(seq_len - num_queries, seq_len):
            seen = index_keys[: position + 1]
            scores = (weights[token, :, None] * (index_q[token] @ seen.T).relu()).sum(0)
            chosen = scores.topk(min(top_k, position + 1)).indices
            keys = cached[chosen]
            attention = (case.q[token] @ keys.T * case.scale).softmax(-1)
            torch.testing.assert_close(output[token], attention @ keys[:, :10])
            token += 1


@pytest.mark.parametrize("top_k", [None, 3])
def test_operator_passes_torchs_own_checks(top_k):
    case = make_latent_case([5, 1], [5, 9], **SIZES, top_k=top_k)
    with forward_context(case.context()):
        torch.library.opcheck(
            torch.ops.octavo.latent_attention_with_output.default,
            case.arguments(torch.zeros(6, 3, 10)),
        )
