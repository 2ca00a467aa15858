"""Log-probabilities of prompt tokens against full forward passes of transformers."""

import pytest
import torch

from services.engine.batch import read_float32, read_int32
from tests.support.random_checkpoints import transformers_logits, write_checkpoint
from tests.support.step_driver import StepDriver

PROMPTS = [[5, 17, 3, 88, 41], [44, 2, 9, 9, 31, 60, 7, 8, 1, 90], [12]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("checkpoint")
    return folder, write_checkpoint(folder, "qwen3")


def run(driver, chunks, num_top):
    descriptor = driver.descriptor(chunks)
    requests = [i for i, (sequence, _) in enumerate(chunks) if sequence.num_prompt > 1]
    descriptor.sampling.prompt_logprob_requests = bytes(torch.tensor(requests).int().numpy())
    descriptor.sampling.num_prompt_logprobs = num_top
    return driver.runner.execute(descriptor).message()


@pytest.mark.parametrize("slice_rows", [1, 3, 128])
def test_they_are_those_of_full_forward_passes(checkpoint, monkeypatch, slice_rows):
    folder, reference = checkpoint
    monkeypatch.setattr("services.engine.worker.runner.step_sampler.SLICE_ROWS", slice_rows)
    driver = StepDriver(folder)
    sequences = [driver.add(prompt) for prompt in PROMPTS]
    result = run(driver, [(each, len(each.token_ids)) for each in sequences], 3)
    expected, best = [], []
    for prompt in PROMPTS[:2]:
        logprobs = transformers_logits(reference, prompt).log_softmax(-1)
        expected += logprobs[range(len(prompt) - 1), prompt[1:]].tolist()
        best += logprobs[:-1].topk(3).indices.tolist()
    torch.testing.assert_close(
        torch.tensor(read_float32(result.prompt_logprobs)), torch.tensor(expected),
        rtol=1e-4, atol=1e-4,
    )  # fmt: skip
    assert read_int32(result.prompt_top_token_ids).reshape(-1, 3).tolist() == best
    assert len(read_int32(result.token_ids)) == 3


def test_a_prompt_in_chunks_gives_the_same(checkpoint):
    folder, _ = checkpoint
    whole = StepDriver(folder)
    prompt = PROMPTS[1]
    expected = read_float32(run(whole, [(whole.add(prompt), 10)], 0).prompt_logprobs)
    driver = StepDriver(folder)
    sequence = driver.add(prompt)
    parts = [read_float32(run(driver, [(sequence, n)], 0).prompt_logprobs) for n in (3, 1, 4, 2)]
    assert [len(part) for part in parts] == [3, 1, 4, 1]
    torch.testing.assert_close(
        torch.cat([torch.tensor(part) for part in parts]), torch.tensor(expected)
    )


def test_a_request_outside_the_batch_is_refused(checkpoint):
    driver = StepDriver(checkpoint[0])
    descriptor = driver.descriptor([(driver.add(PROMPTS[0]), 5)])
    descriptor.sampling.prompt_logprob_requests = bytes(torch.tensor([1]).int().numpy())
    with pytest.raises(ValueError, match="outside the batch"):
        driver.runner.execute(descriptor)
