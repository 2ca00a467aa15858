import pytest
import torch

from services.engine.sampling.logprobs import compute_logprobs
from services.engine.sampling.penalties import Penalties, apply_penalties
from services.engine.sampling.sampler import probabilities, sample
from services.engine.sampling.uniform import uniform
from tests.support.sampling_rows import token_choice

pytestmark = pytest.mark.gpu

NUM_ROWS = 64
PARAMS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"top_p": 0.7},
    {"min_p": 0.05, "temperature": 1.5},
    {"top_k": 3},
]


def random_logits(vocab_size):
    return 4 * torch.randn(NUM_ROWS, vocab_size, generator=torch.Generator().manual_seed(0))


def rows():
    return [PARAMS[i % len(PARAMS)] | {"seed": i * i, "position": i} for i in range(NUM_ROWS)]


def test_uniform_numbers_are_equal_bit_for_bit():
    seeds = torch.arange(-500, 500) * 0x123456789ABCDE
    positions = torch.arange(1000, dtype=torch.int32)
    on_cuda = uniform(seeds.cuda(), positions.cuda())
    assert torch.equal(on_cuda.cpu(), uniform(seeds, positions))


@pytest.mark.parametrize("vocab_size", [1, 7, 1024, 151_936])
def test_samples_and_distributions_are_those_of_the_cpu(vocab_size):
    logits = random_logits(vocab_size)
    on_cpu = token_choice(rows(), vocab_size)
    on_cuda = token_choice(rows(), vocab_size, device="cuda")
    expected = probabilities(logits, on_cpu)
    torch.testing.assert_close(
        probabilities(logits.cuda(), on_cuda).cpu(), expected, rtol=1e-4, atol=1e-6
    )
    drawn = sample(logits.cuda(), on_cuda).cpu()
    # exp rounds differently on the two devices, which moves a draw only at a token's very edge.
    assert (drawn != sample(logits, on_cpu)).sum() <= 1
    assert (expected.gather(1, drawn[:, None]) > 0).all()


def test_greedy_ties_go_to_the_lowest_id():
    logits = torch.zeros(4, 151_936, device="cuda")
    logits[:, [70_001, 123, 150_000]] = 1.0
    choice = token_choice([{"temperature": 0.0}] * 4, 151_936, device="cuda")
    assert sample(logits, choice).tolist() == [123] * 4


def test_penalties_and_logprobs_are_those_of_the_cpu():
    generator = torch.Generator().manual_seed(1)
    logits = random_logits(1000)
    history = torch.randint(0, 50, (NUM_ROWS, 80), generator=generator, dtype=torch.int32)
    seq_lens = torch.randint(20, 80, (NUM_ROWS,), generator=generator)
    tokens = torch.arange(NUM_ROWS)

    def run(device):
        penalties = Penalties(
            history=history.to(device),
            seq_lens=seq_lens.to(device),
            num_prompt_tokens=torch.full((NUM_ROWS,), 10, device=device),
            repetition=torch.full((NUM_ROWS,), 1.3, device=device),
            frequency=torch.full((NUM_ROWS,), 0.3, device=device),
            presence=torch.full((NUM_ROWS,), 0.2, device=device),
        )
        edited = apply_penalties(logits.to(device), penalties)
        logprobs = compute_logprobs(edited, tokens.to(device), 5)
        return [edited.cpu(), logprobs.chosen.cpu(), logprobs.top.cpu()]

    torch.testing.assert_close(run("cuda"), run("cpu"), rtol=1e-5, atol=1e-5)
