import numpy as np
import pytest
import torch

from services.engine.batch import read_float32, read_int32
from tests.support.random_checkpoints import transformers_logits, write_checkpoint
from tests.support.step_driver import (
    VOCAB_SIZE,
    StepDriver,
    greedy_continuation,
    greedy_continuations,
    sampling,
)

PROMPTS = [[5, 17, 3], [44, 2, 9, 9, 31, 60, 7, 8, 1, 90], [12]]
NUM_OUTPUT = 9


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("checkpoint")
    return folder, write_checkpoint(folder, "qwen3")


@pytest.fixture(scope="module")
def folder(checkpoint):
    return checkpoint[0]


@pytest.fixture(scope="module")
def reference(checkpoint):
    return checkpoint[1]


@pytest.fixture(scope="module")
def expected(reference):
    return greedy_continuations(reference, PROMPTS, NUM_OUTPUT)


def test_one_request_decodes_as_full_forward_passes_do(folder, expected):
    driver = StepDriver(folder)
    sequence = driver.add(PROMPTS[1])
    driver.decode([sequence], NUM_OUTPUT)
    assert sequence.output == expected[1]


def test_a_batch_decodes_each_request_as_if_alone(folder, expected):
    driver = StepDriver(folder)
    sequences = [driver.add(prompt) for prompt in PROMPTS]
    driver.decode(sequences, NUM_OUTPUT)
    assert [each.output for each in sequences] == expected


def test_the_answers_differ_so_that_equality_means_something(expected):
    assert len({tuple(output) for output in expected}) == len(PROMPTS)
    assert len(set(expected[1])) > 3


@pytest.mark.parametrize("chunk", [1, 3, 4, 7])
def test_a_prompt_in_chunks_gives_the_same_tokens(folder, expected, chunk):
    driver = StepDriver(folder)
    sequence = driver.add(PROMPTS[1])
    while sequence.num_computed < len(PROMPTS[1]):
        driver.step([(sequence, min(chunk, len(PROMPTS[1]) - sequence.num_computed))])
    driver.decode([sequence], NUM_OUTPUT - 1)
    assert sequence.output == expected[1]


def test_prefill_chunks_and_decodes_mix_in_one_step(folder, expected):
    driver = StepDriver(folder)
    first, second, third = (driver.add(prompt) for prompt in PROMPTS)
    driver.step([(first, 3)])
    driver.step([(first, 1), (second, 4), (third, 1)])
    driver.step([(second, 5), (third, 1), (first, 1)])
    driver.step([(third, 1), (second, 1), (first, 1)])
    driver.decode([second], NUM_OUTPUT - 1)
    driver.decode([first, third], NUM_OUTPUT - 4)
    driver.decode([third], 1)
    assert [each.output for each in (first, second, third)] == expected


def test_steps_may_be_launched_before_earlier_results_are_taken(folder, expected):
    driver = StepDriver(folder)
    sequences = [driver.add(prompt) for prompt in PROMPTS]
    launched = [driver.launch([(each, each.num_tokens) for each in sequences])]
    launched += [driver.launch([(each, 1) for each in sequences]) for _ in range(NUM_OUTPUT - 1)]
    for step in launched:
        driver.collect(step)
    assert [each.output for each in sequences] == expected


def test_a_preempted_request_is_recomputed_to_the_same_tokens(folder, expected):
    driver = StepDriver(folder)
    sequences = [driver.add(prompt) for prompt in PROMPTS]
    driver.decode(sequences, 4)
    driver.preempt(sequences[1])
    driver.decode([sequences[0]], 2)
    driver.decode(sequences[1:], NUM_OUTPUT - 4)
    driver.decode([sequences[0]], NUM_OUTPUT - 6)
    assert [each.output for each in sequences] == expected


def test_a_request_starts_from_blocks_that_another_filled(folder, expected):
    driver = StepDriver(folder)
    first = driver.add(PROMPTS[1])
    driver.decode([first], 2)
    second = driver.add(PROMPTS[1])
    driver.share_blocks(first, second, 2)
    driver.decode([first, second], NUM_OUTPUT - 2)
    driver.decode([second], 2)
    assert [first.output, second.output] == [expected[1], expected[1]]


def test_every_key_and_value_is_in_its_slot_whatever_the_chunks(folder):
    whole, chunked = StepDriver(folder), StepDriver(folder, block_size=8)
    caches = []
    for driver, chunks in ((whole, [10]), (chunked, [3, 1, 6])):
        sequence = driver.add(PROMPTS[1])
        for chunk in chunks:
            driver.step([(sequence, chunk)])
        slots = [
            sequence.block_ids[position // driver.block_size] * driver.block_size
            + position % driver.block_size
            for position in range(10)
        ]
        caches.append([cache.k.flatten(0, 1)[slots] for cache in driver.kv_cache_data])
        caches.append([cache.v.flatten(0, 1)[slots] for cache in driver.kv_cache_data])
    for left, right in ((caches[0], caches[2]), (caches[1], caches[3])):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)


def test_a_sequence_may_fill_the_context_to_its_last_token(folder, reference):
    driver = StepDriver(folder, max_model_len=12, max_num_seqs=2)
    full, other = driver.add(PROMPTS[1]), driver.add(PROMPTS[0])
    driver.decode([full, other], 3)
    assert full.num_computed == 12
    assert other.output == greedy_continuation(reference, PROMPTS[0], 3)


def test_a_chunk_inside_a_prompt_samples_nothing(folder):
    driver = StepDriver(folder)
    result = driver.step([(driver.add(PROMPTS[1]), 4)])
    assert not result.token_ids
    assert result.step_id == 1


def test_logprobs_are_those_of_the_raw_logits(folder, reference):
    driver = StepDriver(folder)
    plain = driver.add(PROMPTS[0], sampling(logprobs=20))
    biased = driver.add(PROMPTS[0], sampling(logprobs=0, logit_bias=((7, 100.0),), temperature=0.5))
    result = driver.step([(plain, 3), (biased, 3)])
    truth = transformers_logits(reference, PROMPTS[0])[-1].log_softmax(-1)
    assert result.num_top_logprobs == 20
    top_ids = read_int32(result.top_token_ids).reshape(2, 20)[0]
    assert top_ids.tolist() == truth.topk(20).indices.tolist()
    top = read_float32(result.top_logprobs).reshape(2, 20)[0]
    np.testing.assert_allclose(top, truth.topk(20).values, atol=1e-4)
    assert (plain.output, biased.output) == ([top_ids[0]], [7])
    chosen = read_float32(result.logprobs)
    np.testing.assert_allclose(chosen, [truth[top_ids[0]], truth[7]], atol=1e-4)


def test_min_tokens_forbids_end_tokens_until_they_are_reached(folder, reference):
    driver = StepDriver(folder)
    end_ids = frozenset(range(VOCAB_SIZE - 1))
    params = sampling(min_tokens=3, end_token_ids=end_ids)
    sequence = driver.add(PROMPTS[0], params)
    driver.decode([sequence], 5)
    assert sequence.output[:3] == [VOCAB_SIZE - 1] * 3
    context = PROMPTS[0] + sequence.output[:3]
    assert sequence.output[3:] == greedy_continuation(reference, context, 2)


def test_penalties_follow_the_output_across_a_preemption(folder, reference):
    params = sampling(
        repetition_penalty=1.3, frequency_penalty=1.0, presence_penalty=0.5, temperature=0.0
    )
    alone = StepDriver(folder)
    expected = alone.add(PROMPTS[1], params)
    alone.decode([expected], NUM_OUTPUT)
    driver = StepDriver(folder)
    sequence, other = driver.add(PROMPTS[1], params), driver.add(PROMPTS[0])
    driver.decode([sequence, other], 4)
    driver.preempt(sequence)
    driver.decode([other, sequence], NUM_OUTPUT - 4)
    assert sequence.output == expected.output
    assert sequence.output != greedy_continuation(reference, PROMPTS[1], NUM_OUTPUT)


def test_a_seed_gives_the_same_tokens_alone_in_a_batch_and_after_preemption(folder):
    params = sampling(temperature=1.0, top_k=30, top_p=0.95, min_p=0.01, seed=2**63 + 11)
    alone = StepDriver(folder)
    expected = alone.add(PROMPTS[1], params)
    alone.decode([expected], NUM_OUTPUT)
    driver = StepDriver(folder)
    crowd = [
        driver.add(prompt, sampling(temperature=2.0, seed=seed))
        for seed, prompt in enumerate(PROMPTS)
    ]
    sequence = driver.add(PROMPTS[1], params)
    driver.decode([*crowd, sequence], 4)
    driver.preempt(sequence)
    driver.decode([sequence, *crowd[:1]], NUM_OUTPUT - 4)
    assert sequence.output == expected.output


def test_a_row_forgets_the_biases_of_its_last_owner(folder, expected):
    driver = StepDriver(folder, max_num_seqs=2)
    first = driver.add(PROMPTS[0], sampling(logit_bias=((7, 100.0),)))
    driver.decode([first], 2)
    driver.free_rows.append(first.row)
    heir = driver.add(PROMPTS[1])
    other = driver.add(PROMPTS[0], sampling(logit_bias=((8, 100.0),)))
    driver.decode([heir, other], NUM_OUTPUT)
    assert heir.output == expected[1]
    assert other.output == [8] * NUM_OUTPUT


def test_bfloat16_runs_and_stays_finite(folder):
    driver = StepDriver(folder, dtype=torch.bfloat16)
    sequence = driver.add(PROMPTS[1], sampling(logprobs=5))
    result = driver.step([(sequence, 10)])
    assert np.isfinite(read_float32(result.top_logprobs)).all()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seq_lens", [2]),
        ("seq_lens", [999]),
        ("seq_lens", [3, 3]),
        ("row_ids", [8]),
        ("row_ids", [-1]),
        ("query_start_loc", [0, 4]),
        ("query_start_loc", [1, 3]),
    ],
)
def test_a_contradictory_descriptor_is_refused(folder, field, value):
    driver = StepDriver(folder)
    descriptor = driver.descriptor([(driver.add(PROMPTS[0]), 3)])
    setattr(descriptor.attn_metadata, field, np.array(value, "<i4").tobytes())
    with pytest.raises(ValueError, match="descriptor is invalid"):
        driver.runner.execute(descriptor)


@pytest.mark.parametrize("sample_indices", [[-1], [2], [0, 2], [1, 0], [1, 1]])
def test_a_sample_that_no_request_takes_is_refused(folder, sample_indices):
    driver = StepDriver(folder)
    descriptor = driver.descriptor([(driver.add(PROMPTS[0]), 3), (driver.add(PROMPTS[1]), 3)])
    descriptor.sampling.sample_indices = np.array(sample_indices, "<i4").tobytes()
    with pytest.raises(ValueError, match="sample"):
        driver.runner.execute(descriptor)


@pytest.mark.parametrize(
    ("field", "value"),
    [("rows", [8]), ("offsets", [32]), ("counts", [2]), ("block_ids", [64]), ("block_ids", [])],
)
def test_a_block_table_update_outside_the_table_is_refused(folder, field, value):
    driver = StepDriver(folder)
    descriptor = driver.descriptor([(driver.add(PROMPTS[0]), 3)])
    updates = descriptor.attn_metadata.block_table_updates
    setattr(updates, field, np.array(value, "<i4").tobytes())
    with pytest.raises(ValueError, match="descriptor is invalid"):
        driver.runner.execute(descriptor)


def test_a_token_outside_the_vocabulary_is_refused(folder):
    driver = StepDriver(folder)
    descriptor = driver.descriptor([(driver.add([VOCAB_SIZE]), 1)])
    with pytest.raises(ValueError, match="vocabulary"):
        driver.runner.execute(descriptor)


def test_a_graph_that_was_never_captured_is_refused(folder):
    driver = StepDriver(folder)
    descriptor = driver.descriptor([(driver.add(PROMPTS[0]), 3)])
    descriptor.cudagraph_runtime_mode = 3
    with pytest.raises(ValueError, match="graph mode FULL"):
        driver.runner.execute(descriptor)
