"""Verification keeps the model's distribution, whatever was guessed."""

import pytest
import torch

from services.engine.batch import read_float32, read_int32, step_result
from services.engine.sampling.sampler import TokenChoice, greedy, sample
from services.engine.spec_decode.verification import NO_DRAFT, Drafted, count_accepted
from tests.support.sampling_rows import probabilities

VOCAB = 12
NUM_ROWS = 6000
NUM_DRAFTS = 3
CHI_SQUARE_LIMIT = {2: 13.8, 3: 16.3, 4: 18.5, 5: 20.5, 6: 22.5, 7: 24.3, 8: 26.1, 9: 27.9,
                    10: 29.6, 11: 31.3}  # fmt: skip
"""By degrees of freedom: one sample in a thousand is above it."""

KINDS = {
    "temperature": {"temperature": 1.0},
    "hot": {"temperature": 1.7},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_p": {"temperature": 0.9, "top_p": 0.8},
    "min_p": {"temperature": 1.2, "min_p": 0.15},
    "all": {"temperature": 1.1, "top_k": 8, "top_p": 0.9, "min_p": 0.05},
}


def accepted(sampled, drafts):
    return count_accepted(torch.tensor(sampled), torch.tensor(drafts)).tolist()


def test_drafts_hold_up_to_the_first_that_differs():
    sampled = [[1, 2, 3], [1, 2, 3], [1, 2, 3], [9, 2, 3]]
    assert accepted(sampled, [[1, 2], [1, 9], [9, 2], [1, 2]]) == [2, 1, 0, 0]


def test_a_row_without_drafts_accepts_none():
    assert accepted([[1, 1, 1], [4, 4, 4]], [[NO_DRAFT, NO_DRAFT], [4, NO_DRAFT]]) == [0, 1]


def choice(num_rows, seeds, positions, *, temperature, top_k=0, top_p=1.0, min_p=0.0):
    return TokenChoice(
        temperature=torch.full((num_rows,), float(temperature)),
        top_k=torch.full((num_rows,), top_k),
        top_p=torch.full((num_rows,), top_p),
        min_p=torch.full((num_rows,), min_p),
        seeds=seeds,
        positions=positions,
    )


def markov_logits():
    """Logits of what follows each token: the whole past is the last token."""
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3)) * 1.5


def speculate(logits, drafts, seeds, **kind):
    """Runs one step per row from token 0, through the functions that the worker uses."""
    num_rows, width = len(seeds), NUM_DRAFTS + 1
    before = torch.cat((torch.zeros(num_rows, 1, dtype=torch.long), drafts), dim=1)
    positions = torch.arange(10, 10 + width, dtype=torch.int32).repeat(num_rows)
    sampled = sample(
        logits[before.flatten()],
        choice(num_rows * width, seeds.repeat_interleave(width), positions, **kind),
    ).view(num_rows, width)
    return sampled, count_accepted(sampled, drafts)


def require_follows(counts, expected):
    """Pearson's test; tokens that are hardly ever drawn count together."""
    is_common = expected >= 5
    observed = torch.cat((counts[is_common], counts[~is_common].sum()[None]))
    wanted = torch.cat((expected[is_common], expected[~is_common].sum()[None]))
    if wanted[-1] < 5:
        assert observed[-1] <= 15
        observed, wanted = observed[:-1], wanted[:-1]
    statistic = ((observed - wanted) ** 2 / wanted).sum().item()
    assert statistic < CHI_SQUARE_LIMIT[max(2, len(wanted) - 1)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drafting", ["likeliest", "random", "unlikely"])
def test_every_position_keeps_the_models_distribution(kind, drafting):
    kind, logits = KINDS[kind], markov_logits()
    seeds = torch.arange(NUM_ROWS) * 7919 + 1
    generator = torch.Generator().manual_seed(11)
    if drafting == "random":
        drafts = torch.randint(VOCAB, (NUM_ROWS, NUM_DRAFTS), generator=generator)
    else:
        path = [0]
        for _ in range(NUM_DRAFTS):
            following = logits[path[-1]]
            path.append(int(following.argmax() if drafting == "likeliest" else following.argmin()))
        drafts = torch.tensor(path[1:]).repeat(NUM_ROWS, 1)
    sampled, held = speculate(logits, drafts, seeds, **kind)
    one = choice(VOCAB, torch.zeros(VOCAB, dtype=torch.long), torch.zeros(VOCAB).int(), **kind)
    following = probabilities(logits, one).double()
    before = torch.cat((torch.zeros(NUM_ROWS, 1, dtype=torch.long), sampled), dim=1)
    for position in range(NUM_DRAFTS + 1):
        is_reached = held >= position
        for last in before[is_reached, position].unique().tolist():
            rows = is_reached & (before[:, position] == last)
            if rows.sum() < 200:
                continue
            counts = torch.bincount(sampled[rows, position], minlength=VOCAB).double()
            require_follows(counts, following[last] * int(rows.sum()))
            if position == 0:
                rate = (held[rows] > 0).double().mean()
                drafted = following[last][drafts[rows, 0]].mean()
                assert abs(rate - drafted) < 0.03


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_tokens_whatever_is_guessed(kind):
    kind, logits = KINDS[kind], markov_logits()
    seeds = torch.arange(500)
    expected = []
    last = torch.zeros(len(seeds), dtype=torch.long)
    for position in range(10, 10 + NUM_DRAFTS + 1):
        at = torch.full((len(seeds),), position, dtype=torch.int32)
        last = sample(logits[last], choice(len(seeds), seeds, at, **kind))
        expected.append(last)
    expected = torch.stack(expected, dim=1)
    for round_ in range(3):
        drafts = expected[:, :-1].clone()
        wrong = torch.rand(drafts.shape, generator=torch.Generator().manual_seed(round_)) < 0.3
        drafts[wrong] = (drafts[wrong] + 1) % VOCAB
        sampled, held = speculate(logits, drafts, seeds, **kind)
        assert 0 < held.float().mean() < NUM_DRAFTS
        is_kept = torch.arange(NUM_DRAFTS + 1) <= held[:, None]
        assert torch.equal(sampled[is_kept], expected[is_kept])


def test_temperature_0_accepts_what_is_likeliest():
    logits = markov_logits()
    first = int(greedy(logits[:1]))
    second = int(greedy(logits[first][None]))
    third = int(greedy(logits[second][None]))
    drafts = torch.tensor([[first, second, third], [first, second, (third + 1) % VOCAB]])
    sampled, held = speculate(logits, drafts, torch.zeros(2, dtype=torch.long), temperature=0.0)
    assert held.tolist() == [3, 2]
    assert sampled[:, :3].tolist() == [[first, second, third]] * 2


def test_a_result_keeps_what_was_sampled_up_to_the_first_wrong_draft():
    result = step_result(
        7,
        [1, 2, 3, 4, 5, 6],
        logprobs=[-0.1, -0.2, -0.3, -0.4, -0.5, -0.6],
        top_token_ids=[[10, 11], [20, 21], [30, 31], [40, 41], [50, 51], [60, 61]],
        top_logprobs=[[-1, -2], [-2, -3], [-3, -4], [-4, -5], [-5, -6], [-6, -7]],
    )
    Drafted(
        sampled=torch.arange(1, 7, dtype=torch.int32),
        num_accepted=torch.tensor([0, 2], dtype=torch.int32),
        token_ids=torch.tensor([[8, 9], [6, 5]], dtype=torch.int32),
    ).trim(result)
    assert read_int32(result.token_ids).tolist() == [1, 4, 5, 6]
    assert read_float32(result.logprobs).tolist() == pytest.approx([-0.1, -0.4, -0.5, -0.6])
    assert read_int32(result.top_token_ids).tolist() == [10, 11, 40, 41, 50, 51, 60, 61]
    assert read_float32(result.top_logprobs).tolist() == [-1, -2, -4, -5, -5, -6, -6, -7]
    assert read_int32(result.num_accepted_tokens).tolist() == [0, 2]
    assert read_int32(result.draft_token_ids).tolist() == [8, 9, 6, 5]
