"""Vectors equal transformers' hidden states, pooled by the formulas written here."""

import json

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from models.config import ConfigError
from models.config_sections.pooling import read_pooling
from models.loading.checkpoint_tensor import CheckpointError
from tests.support.invariance import batch_invariance
from tests.support.pooled_engine import PooledEngine, save_tensors, write_pooling
from tests.support.random_checkpoints import write_checkpoint

LENGTHS = (1, 7, 16, 33, 2, 127, 5)
TOLERANCE = 1e-4
FAMILIES = ("qwen3", "llama_bias", "qwen3_next")


def prompts_of(lengths=LENGTHS):
    return [[(7 * i + 13 * n + i * i) % 97 for i in range(n)] for n in lengths]


@torch.inference_mode()
def hidden_states(model, prompt):
    """The states after the last norm, [length, hidden]."""
    return model.model(torch.tensor([prompt])).last_hidden_state[0].float()


def check(found, expected):
    np.testing.assert_allclose(found, torch.stack(expected).numpy(), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_without_files_the_last_token_is_taken_and_normalised(family, tmp_path):
    model = write_checkpoint(tmp_path, family)
    found = PooledEngine(tmp_path).embed(prompts_of())
    check(found, [normalize(hidden_states(model, each)[-1], dim=0) for each in prompts_of()])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_mean_of_chunked_prompts_is_that_of_all_tokens(family, tmp_path):
    model = write_checkpoint(tmp_path, family)
    write_pooling(tmp_path, "mean_tokens")
    found = PooledEngine(tmp_path, max_num_batched_tokens=11).embed(prompts_of())
    check(found, [hidden_states(model, each).mean(0) for each in prompts_of()])


def test_the_first_token_is_taken_of_chunked_prompts(tmp_path):
    model = write_checkpoint(tmp_path, "qwen3")
    write_pooling(tmp_path, "cls_token", is_normalized=True)
    found = PooledEngine(tmp_path).embed(prompts_of())
    check(found, [normalize(hidden_states(model, each)[0], dim=0) for each in prompts_of()])


def test_dense_layers_follow_the_mean(tmp_path):
    model = write_checkpoint(tmp_path, "qwen3")
    torch.manual_seed(3)
    first, second, bias = torch.randn(48, 32), torch.randn(24, 48), torch.randn(24)
    dense = [(first, None, "linear.Identity"), (second, bias, "activation.Tanh")]
    write_pooling(tmp_path, "mean_tokens", is_normalized=True, dense=dense)
    found = PooledEngine(tmp_path).embed(prompts_of())
    means = [hidden_states(model, each).mean(0) for each in prompts_of()]
    check(found, [normalize(torch.tanh(second @ (first @ each) + bias), dim=0) for each in means])


@pytest.mark.parametrize("mode", ["lasttoken", "mean_tokens"])
def test_few_blocks_preempt_and_change_no_vector(mode, tmp_path):
    write_checkpoint(tmp_path, "qwen3")
    write_pooling(tmp_path, mode)
    prompts = prompts_of((60, 61, 62, 59, 63, 58))
    expected = PooledEngine(tmp_path).embed(prompts)
    few = PooledEngine(tmp_path, num_blocks=18, max_num_batched_tokens=7)
    np.testing.assert_allclose(few.embed(prompts), expected, atol=1e-5)


def test_all_blocks_are_free_after_the_last_vector(tmp_path):
    write_checkpoint(tmp_path, "qwen3")
    engine = PooledEngine(tmp_path)
    engine.embed(prompts_of())
    assert engine.scheduler.num_free_blocks == 64


def test_a_shared_prefix_is_computed_once_for_the_last_token_alone(tmp_path):
    write_checkpoint(tmp_path, "qwen3")
    [prompt] = prompts_of((60,))
    for mode, num_cached in (("lasttoken", 56), ("mean_tokens", 0)):
        folder = tmp_path / mode
        folder.mkdir()
        write_checkpoint(folder, "qwen3")
        write_pooling(folder, mode)
        engine = PooledEngine(folder)
        first, second = (engine.embed([prompt]) for _ in range(2))
        assert engine.scheduler.counts.cached_tokens == num_cached
        np.testing.assert_allclose(first, second, atol=1e-5)


def test_a_prompt_may_fill_the_context(tmp_path):
    model = write_checkpoint(tmp_path, "llama_bias")
    [prompt] = prompts_of((128,))
    found = PooledEngine(tmp_path).embed([prompt])
    check(found, [normalize(hidden_states(model, prompt)[-1], dim=0)])


def test_scores_are_the_odds_of_yes_against_no(tmp_path):
    model = write_checkpoint(tmp_path, "qwen3")
    tokenizer = {"model": {"vocab": {"yes": 41, "no": 17}}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    found = PooledEngine(tmp_path, "score").embed(prompts_of())
    expected = []
    for prompt in prompts_of():
        with torch.inference_mode():
            logits = model(torch.tensor([prompt])).logits[0, -1, [17, 41]].float()
        expected.append(logits.softmax(-1)[1:])
    check(found, expected)


def write_classifier(folder, **changes):
    """Turns a checkpoint into one of a class with a head for labels; returns the head."""
    model = write_checkpoint(folder, "qwen3")
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    (folder / "config.json").write_text(json.dumps(config | changes))
    torch.manual_seed(5)
    head = torch.randn(1, 32)
    stored = model.model.state_dict(prefix="model.")
    save_tensors(stored | {"score.weight": head}, folder / "model.safetensors")
    return model, head


def test_a_head_for_one_label_scores_the_last_token(tmp_path):
    model, head = write_classifier(tmp_path)
    found = PooledEngine(tmp_path, "score").embed(prompts_of())
    check(found, [torch.sigmoid(head @ hidden_states(model, each)[-1]) for each in prompts_of()])


def test_a_head_of_several_labels_is_refused(tmp_path):
    write_classifier(tmp_path, id2label={"0": "a", "1": "b"})
    with pytest.raises(ConfigError, match="has 2 labels"):
        read_pooling(tmp_path, "score")


def test_a_decoder_stored_without_its_prefix_is_served(tmp_path):
    model = write_checkpoint(tmp_path, "qwen3")
    expected = PooledEngine(tmp_path).embed(prompts_of())
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = ["Qwen3Model"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_tensors(model.model.state_dict(), tmp_path / "model.safetensors")
    np.testing.assert_array_equal(PooledEngine(tmp_path).embed(prompts_of()), expected)


def test_an_untied_head_is_not_loaded(tmp_path):
    write_checkpoint(tmp_path, "qwen3", tie_word_embeddings=False)
    engine = PooledEngine(tmp_path)
    model = engine.runner.model
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_dense_layer_of_another_size_is_refused(tmp_path):
    write_checkpoint(tmp_path, "qwen3")
    write_pooling(tmp_path, "mean_tokens", dense=[(torch.randn(8, 31), None, "linear.Identity")])
    with pytest.raises(CheckpointError, match="in_features is 31; the vectors have 32"):
        PooledEngine(tmp_path)


@pytest.mark.parametrize("mode", ["lasttoken", "mean_tokens"])
def test_in_batch_invariant_mode_a_vector_has_the_same_bits_in_any_company(mode, tmp_path):
    write_checkpoint(tmp_path, "qwen3")
    dense = [(torch.randn(24, 32), None, "linear.Identity")]
    write_pooling(tmp_path, mode, is_normalized=True, dense=dense)
    with batch_invariance():
        alone = [PooledEngine(tmp_path).embed([each])[0] for each in prompts_of()]
        together = PooledEngine(tmp_path, max_num_batched_tokens=23).embed(prompts_of())
    np.testing.assert_array_equal(together, np.stack(alone))
