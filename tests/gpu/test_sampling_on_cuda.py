import pytest
import torch

from models.operands.draws import NO_TOKEN
from models.ops.sampling.uniform import uniform
from services.engine.sampling.logit_edits import LogitEdits, edit_logits
from services.engine.sampling.logprobs import compute_logprobs
from services.engine.sampling.sampler import sample
from tests.support.sampling_kernels import (
    DTYPES,
    PARAMS,
    check_logprobs,
    check_masks,
    check_penalties,
    check_sampling,
    drawn_by_kernel,
    mixed_choice,
    odd_logits,
    random_logits,
)
from tests.support.sampling_rows import probabilities, token_choice

pytestmark = pytest.mark.gpu

VOCAB_SIZES = [1, 7, 127, 32_000, 151_936, 262_144]


def test_uniform_numbers_are_equal_bit_for_bit():
    seeds = torch.arange(-500, 500) * 0x123456789ABCDE
    positions = torch.arange(1000, dtype=torch.int32)
    on_cuda = uniform(seeds.cuda(), positions.cuda())
    assert torch.equal(on_cuda.cpu(), uniform(seeds, positions))


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_masked_logits_are_exactly_those_of_the_reference(vocab_size):
    for num_rows in (1, 3, 256):
        check_masks(num_rows, vocab_size, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_tokens_are_exactly_those_of_the_reference_on_the_cpu(vocab_size, dtype):
    for num_rows in (1, 3, 17):
        logits = random_logits(num_rows, vocab_size, dtype)
        check_sampling(logits, first=vocab_size if num_rows < 17 else 0, device="cuda")


@pytest.mark.parametrize("vocab_size", [300, 20_000])
def test_tokens_of_odd_logits_are_those_of_the_reference(vocab_size):
    for logits in odd_logits(vocab_size).values():
        check_sampling(logits, device="cuda")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_broken_logits_name_no_token(value):
    logits = torch.full((len(PARAMS), 5000), value, device="cuda")
    drawn = drawn_by_kernel(logits, mixed_choice(len(PARAMS), device="cuda"))
    assert (drawn == NO_TOKEN).all()


def test_weights_of_the_reference_are_the_same_on_both_devices():
    logits = random_logits(len(PARAMS), 32_000, torch.float32)
    rows = [params | {"seed": 3} for params in PARAMS]
    on_cuda = probabilities(logits.cuda(), token_choice(rows, device="cuda"))
    torch.testing.assert_close(
        on_cuda.cpu(), probabilities(logits, token_choice(rows)), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("params", PARAMS[2:8])
def test_draws_follow_the_distribution(params):
    count, vocab_size = 20_000, 50
    logits = random_logits(1, vocab_size, torch.float32)
    rows = [params | {"seed": 11, "position": position} for position in range(count)]
    drawn = sample(logits.cuda().expand(count, -1), token_choice(rows, device="cuda")).cpu()
    observed = torch.bincount(drawn, minlength=vocab_size).float()
    expected = probabilities(logits, token_choice([params]))[0] * count
    assert observed[expected == 0].sum() == 0
    is_common = expected >= 5
    # Rare tokens are counted as one, so that every bin's count is nearly normal.
    observed = torch.cat([observed[is_common], observed[~is_common].sum()[None]])
    expected = torch.cat([expected[is_common], expected[~is_common].sum()[None]])
    chi_square = ((observed - expected) ** 2 / expected.clamp(min=1)).sum()
    degrees = max(len(observed) - 1, 1)
    assert chi_square <= degrees + 5 * (2 * degrees) ** 0.5


def test_a_row_draws_the_same_token_beside_any_other_row():
    logits = random_logits(300, 151_936, torch.float32).cuda()
    together = drawn_by_kernel(logits, mixed_choice(300, device="cuda"))
    for first in (0, 17, 120, 283):
        rows = [
            PARAMS[i % len(PARAMS)] | {"seed": i * i * 7919 - 3, "position": i}
            for i in range(first, first + 5)
        ]
        alone = sample(logits[first : first + 5], token_choice(rows, device="cuda"))
        assert torch.equal(alone, together[first : first + 5])


def test_greedy_ties_go_to_the_lowest_id():
    logits = torch.zeros(4, 151_936, device="cuda")
    logits[:, [70_001, 123, 150_000]] = 1.0
    choice = token_choice([{"temperature": 0.0}] * 4, device="cuda")
    assert sample(logits, choice).tolist() == [123] * 4


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_penalties_change_the_bits_that_the_reference_changes(vocab_size):
    for num_rows in (1, 3, 17):
        check_penalties(num_rows, vocab_size, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_logprobs_are_those_of_the_reference(vocab_size, dtype):
    for num_rows, num_top in ((1, 20), (3, 0), (17, 5)):
        check_logprobs(num_rows, vocab_size, dtype, num_top=num_top, device="cuda")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_nothing_waits_for_the_device():
    logits = random_logits(17, 32_000, torch.float32).cuda()
    choice = mixed_choice(17, device="cuda")
    bias = (
        torch.zeros(2, 1, dtype=torch.int32, device="cuda"),
        torch.ones(2, 1, device="cuda"),
    )
    edits = LogitEdits(indices=torch.tensor([4, 2], device="cuda"), penalties=None, biases=(bias,))
    try:
        torch.cuda.set_sync_debug_mode("error")
        edited = edit_logits(logits, edits)
        compute_logprobs(logits, sample(edited, choice), 20)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    changed = (edited != logits).nonzero().tolist()
    assert changed == [[2, 0], [4, 0]]
