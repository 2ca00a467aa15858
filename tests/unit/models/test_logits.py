"""Logits through the paged cache equal transformers' on the same weights."""

import copy
import json
import random

import pytest
import torch

from models.loading.loader import load_model
from tests.support.paged_runner import PagedRunner
from tests.support.random_checkpoints import (
    EVERY_VARIANT,
    transformers_logits,
    write_checkpoint,
)

CPU = torch.device("cpu")
BLOCK_SIZE = 4


def random_tokens(length, seed=0):
    return random.Random(seed).choices(range(97), k=length)


def assert_close(actual, expected, relative=1e-4):
    scale = expected.abs().max()
    assert (actual - expected).abs().max() <= relative * scale


@pytest.fixture(params=EVERY_VARIANT)
def pair(request, checkpoint):
    folder, reference = checkpoint(request.param)
    return load_model(folder, device=CPU, dtype=torch.float32), reference


@pytest.mark.parametrize("length", [1, 7, BLOCK_SIZE * 5, BLOCK_SIZE * 5 + 1])
def test_whole_prompt_gives_the_logits_of_transformers(pair, length):
    model, reference = pair
    tokens = random_tokens(length)
    runner = PagedRunner(model, block_size=BLOCK_SIZE)
    logits = runner.run(runner.add(tokens), chunk_size=length)
    assert_close(logits, transformers_logits(reference, tokens))


@pytest.mark.parametrize("chunk_size", [1, 3, BLOCK_SIZE, 13])
def test_chunks_of_any_size_give_the_logits_of_the_whole(pair, chunk_size):
    model, reference = pair
    tokens = random_tokens(43)
    runner = PagedRunner(model, block_size=BLOCK_SIZE)
    logits = runner.run(runner.add(tokens), chunk_size)
    assert_close(logits, transformers_logits(reference, tokens))


def test_decodes_and_chunks_in_one_batch_do_not_disturb_each_other(pair):
    model, reference = pair
    runner = PagedRunner(model, block_size=BLOCK_SIZE)
    sequences = [runner.add(random_tokens(n, seed=n)) for n in (30, 9, 41, 17, 8, 25)]
    seen = [[] for _ in sequences]
    steps = [
        {0: 29, 1: 8},
        {0: 1, 2: 40, 1: 1},  # a chunk between two decodes
        {3: 16, 5: 9, 4: 7},
        {2: 1, 3: 1, 5: 16, 4: 1},
    ]
    for step in steps:
        results = runner.step([(sequences[i], n) for i, n in step.items()])
        for i, logits in zip(step, results, strict=True):
            seen[i].append(logits)
    for sequence, pieces in zip(sequences, seen, strict=True):
        assert_close(torch.cat(pieces), transformers_logits(reference, sequence.token_ids))


def test_greedy_tokens_are_those_of_transformers_over_64_steps(pair):
    model, reference = pair
    runner = PagedRunner(model, block_size=BLOCK_SIZE)
    sequence, other = runner.add(random_tokens(11, seed=3)), runner.add(random_tokens(70))
    logits = runner.step([(sequence, 11), (other, 5)])[0]
    for _ in range(64):
        sequence.token_ids.append(int(logits[-1].argmax()))
        logits = runner.step([(sequence, 1), (other, 1)])[0]
    best = transformers_logits(reference, sequence.token_ids).argmax(-1).tolist()
    assert sequence.token_ids[11:] == best[10:-1]


def test_decode_groups_split_by_size_agree_with_the_whole(checkpoint, monkeypatch):
    folder, reference = checkpoint("qwen3")
    monkeypatch.setattr("models.ops.attention.attention_metadata.CPU_GROUP_KEYS", 48)
    runner = PagedRunner(load_model(folder, device=CPU, dtype=torch.float32), num_blocks=128)
    sequences = [runner.add(random_tokens(n, seed=n)) for n in (60, 5, 12, 11, 40, 3, 4)]
    for sequence in sequences:
        runner.step([(sequence, len(sequence.token_ids) - 1)])
    results = runner.step([(sequence, 1) for sequence in sequences])
    for sequence, logits in zip(sequences, results, strict=True):
        assert_close(logits[0], transformers_logits(reference, sequence.token_ids)[-1])


@pytest.mark.parametrize("variant", ["bailing_hybrid", "deepseek_v3", "llama"])
def test_families_that_rotate_whole_heads_pass_over_a_part(variant, tmp_path):
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    reference = write_checkpoint(tmp_path, variant, rope_parameters=rope)
    tokens = random_tokens(30)
    runner = PagedRunner(load_model(tmp_path, device=CPU, dtype=torch.float32))
    assert_close(
        runner.run(runner.add(tokens), chunk_size=7), transformers_logits(reference, tokens)
    )


SCALING = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
OF_KINDS = {
    kind: {"rope_type": "default", "rope_theta": theta}
    for kind, theta in (("full_attention", 777.0), ("sliding_attention", 333.0))
}


@pytest.mark.parametrize(
    ("variant", "given", "changes"),
    [
        pytest.param("olmo3", {}, {"rope_parameters": None}, id="olmo3-theta"),
        pytest.param(
            "olmo3", {"rope_parameters": OF_KINDS}, {"rope_scaling": SCALING}, id="olmo3-scaling"
        ),
        pytest.param("smollm3_odd", {}, {"layer_types": None}, id="smollm3-windows"),
        pytest.param(
            "smollm3_odd",
            {},
            {"layer_types": None, "use_sliding_window": False},
            id="smollm3-no-windows",
        ),
    ],
)
def test_older_files_mean_what_they_mean_to_transformers(variant, given, changes, tmp_path):
    written = write_checkpoint(tmp_path, variant, **given)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    reference = type(written).from_pretrained(tmp_path, attn_implementation="eager").eval()
    tokens = random_tokens(40)
    runner = PagedRunner(load_model(tmp_path, device=CPU, dtype=torch.float32))
    assert_close(
        runner.run(runner.add(tokens), chunk_size=9), transformers_logits(reference, tokens)
    )


@pytest.mark.parametrize("variant", ["llama_bias", "qwen3"])
def test_bfloat16_is_as_near_to_float32_as_transformers_is(checkpoint, variant):
    folder, reference = checkpoint(variant)
    model = load_model(folder, device=CPU, dtype=torch.bfloat16)
    tokens = random_tokens(60)
    runner = PagedRunner(model, block_size=BLOCK_SIZE)
    logits = runner.run(runner.add(tokens), chunk_size=11)
    exact = transformers_logits(reference, tokens)
    rounded = transformers_logits(copy.deepcopy(reference).bfloat16(), tokens)
    assert (logits - exact).abs().mean() <= 1.25 * (rounded - exact).abs().mean()


def test_cache_holds_the_keys_and_values_of_transformers(checkpoint):
    folder, reference = checkpoint("qwen3")
    tokens = random_tokens(22)
    runner = PagedRunner(load_model(folder, device=CPU, dtype=torch.float32))
    sequence = runner.add(tokens)
    runner.run(sequence, chunk_size=5)
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens]), use_cache=True).past_key_values
    for index, layer in enumerate(expected.layers):
        keys, values = runner.cached(sequence, index)
        torch.testing.assert_close(keys, layer.keys[0].transpose(0, 1), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(values, layer.values[0].transpose(0, 1), rtol=1e-4, atol=1e-4)


def test_a_step_writes_only_its_own_slots(checkpoint):
    folder, _ = checkpoint("llama")
    runner = PagedRunner(load_model(folder, device=CPU, dtype=torch.float32))
    other, sequence = runner.add(random_tokens(9)), runner.add(random_tokens(6))
    runner.step([(other, 9)])
    before = [(cache.k.clone(), cache.v.clone()) for cache in runner.kv_caches]
    runner.step([(sequence, 6)])
    slots = [sequence.block_ids[i // 4] * 4 + i % 4 for i in range(6)]
    for cache, (k, v) in zip(runner.kv_caches, before, strict=True):
        for after, saved in ((cache.k, k), (cache.v, v)):
            changed = (after != saved).flatten(0, 1).flatten(1).any(dim=1)
            assert sorted(slots) == changed.nonzero().flatten().tolist()


def test_logits_have_the_models_dtype_and_cover_the_vocabulary(checkpoint):
    folder, _ = checkpoint("llama_tied")
    model = load_model(folder, device=CPU, dtype=torch.bfloat16)
    logits = model.compute_logits(torch.zeros(3, 32, dtype=torch.bfloat16))
    assert logits.shape == (3, 97)
    assert logits.dtype == torch.bfloat16
