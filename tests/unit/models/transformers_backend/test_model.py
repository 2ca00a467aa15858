"""Decoders of transformers with our attention compute what transformers computes."""

import json
import random

import pytest
import torch
import transformers

from models.config import ConfigError, ModelConfig
from models.config_sections.families import OWN_ARCHITECTURES
from models.layers.decoder import CausalLM
from models.layers.linear import RowParallelLinear
from models.layers.norm import RMSNorm
from models.loading.checkpoint import CheckpointError
from models.loading.loader import load_model
from models.loading.model_config import read_model_config
from models.registry import model_class
from tests.support.foreign_checkpoints import FOREIGN, write_foreign_checkpoint
from tests.support.paged_runner import PagedRunner
from tests.support.random_checkpoints import write_checkpoint

CPU = torch.device("cpu")


def load(folder, **options):
    return load_model(folder, device=CPU, dtype=torch.float32, **options)


def tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(97), k=count)


@torch.no_grad()
def logits_of(reference, prompt: list[int]) -> torch.Tensor:
    return reference(torch.tensor([prompt])).logits[0]


@pytest.mark.parametrize("architecture", FOREIGN)
def test_logits_are_those_of_transformers_whole_chunked_and_mixed(architecture, tmp_path):
    reference = write_foreign_checkpoint(tmp_path, architecture)
    runner = PagedRunner(load(tmp_path, model_impl="transformers"))
    prompts = [tokens(30, seed) for seed in range(3)]
    expected = [logits_of(reference, prompt) for prompt in prompts]
    limit = 1e-4 * max(each.abs().max().item() for each in expected)
    torch.testing.assert_close(
        runner.run(runner.add(prompts[0]), 30), expected[0], atol=limit, rtol=0
    )
    torch.testing.assert_close(
        runner.run(runner.add(prompts[1]), 4), expected[1], atol=limit, rtol=0
    )
    decoding, prefilling = runner.add(prompts[0]), runner.add(prompts[2])
    runner.step([(decoding, 29)])
    one, many = runner.step([(decoding, 1), (prefilling, 30)])
    torch.testing.assert_close(one, expected[0][29:], atol=limit, rtol=0)
    torch.testing.assert_close(many, expected[2], atol=limit, rtol=0)


def test_scaling_past_the_longest_sequence_changes_nothing(tmp_path):
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    reference = write_foreign_checkpoint(
        tmp_path, "StableLmForCausalLM", rope_parameters=rope, hidden_size=64
    )
    runner = PagedRunner(load(tmp_path))
    expected = logits_of(reference, tokens(30))
    limit = 1e-4 * expected.abs().max().item()
    actual = runner.run(runner.add(tokens(30)), 7)
    torch.testing.assert_close(actual, expected, atol=limit, rtol=0)


@pytest.mark.parametrize(
    "family", ["llama", "gemma2", "qwen3", "mixtral", "deepseek_v3", "gpt_oss"]
)
def test_a_family_of_ours_gives_the_same_as_modules_of_transformers(family, tmp_path):
    # transformers 5.17 ignores another limit than 7.
    write_checkpoint(tmp_path, family, **({"swiglu_limit": 7.0} if family == "gpt_oss" else {}))
    prompt = tokens(24)
    logits = []
    for model_impl in ("octavo", "transformers"):
        runner = PagedRunner(load(tmp_path, model_impl=model_impl))
        logits.append(runner.run(runner.add(prompt), 7))
    torch.testing.assert_close(*logits, atol=1e-4 * logits[0].abs().max().item(), rtol=0)


def test_products_and_norms_are_ours_where_they_compute_the_same(tmp_path):
    write_checkpoint(tmp_path, "smollm3", num_hidden_layers=3)
    network = load(tmp_path, model_impl="transformers").network
    kinds = [type(module) for module in network.modules()]
    assert sum(issubclass(kind, RowParallelLinear) for kind in kinds) == 3 * 7 + 1
    assert sum(issubclass(kind, RMSNorm) for kind in kinds) == 3 * 2 + 1


def test_a_norm_of_another_formula_stays(tmp_path):
    config = transformers.Gemma3TextConfig(
        vocab_size=97, hidden_size=32, intermediate_size=56, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, sliding_window=7,
    )  # fmt: skip
    reference = transformers.Gemma3ForCausalLM(config).eval()
    reference.save_pretrained(tmp_path)
    model = load(tmp_path, model_impl="transformers")
    assert not any(isinstance(module, RMSNorm) for module in model.network.modules())
    runner, prompt = PagedRunner(model), tokens(20)
    expected = logits_of(reference, prompt)
    torch.testing.assert_close(runner.run(runner.add(prompt), 3), expected, atol=1e-4, rtol=0)


def test_the_configuration_says_what_layers_cache(tmp_path):
    write_foreign_checkpoint(tmp_path, "Cohere2ForCausalLM")
    config = read_model_config(tmp_path, "transformers")
    assert config.sliding_windows == (7, 7, 7, None)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 8)
    assert config.transformers is not None
    assert config.transformers.version == transformers.__version__


def test_layers_that_cache_different_sizes_keep_all_keys(tmp_path):
    write_foreign_checkpoint(tmp_path, "Gemma4ForCausalLM")
    assert read_model_config(tmp_path, "transformers").sliding_windows == (None,) * 4
    model = load(tmp_path, model_impl="transformers")
    assert [spec.head_dim for spec in model.cache_specs()] == [8, 16, 8, 16]


def small(config_class: str, **changes):
    shape = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return getattr(transformers, config_class)(**{**shape, **changes})


@pytest.mark.parametrize(
    ("architecture", "config_class", "changes", "reason"),
    [
        ("FalconForCausalLM", "FalconConfig", {}, "attends by classes of its own"),
        (
            "PegasusForCausalLM",
            "PegasusConfig",
            {"is_encoder_decoder": False, "decoder_layers": 2, "d_model": 32},
            "counts positions by itself",
        ),
        ("MambaForCausalLM", "MambaConfig", {}, "keeps a state .* in its MambaMixer"),
        ("RwkvForCausalLM", "RwkvConfig", {}, "keeps a state .* in its RwkvSelfAttention"),
        ("MiniMaxForCausalLM", "MiniMaxConfig", {}, "has layers of kind linear_attention"),
        ("DiffLlamaForCausalLM", "DiffLlamaConfig", {}, "attends 2 times in a layer"),
        (
            "GPT2LMHeadModel",
            "GPT2Config",
            {"add_cross_attention": True},
            "has cross attention",
        ),
    ],
)
def test_what_our_attention_does_not_compute_is_refused_by_name(
    architecture, config_class, changes, reason, tmp_path
):
    config = small(config_class, **changes)
    config.architectures = [architecture]
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=reason) as caught:
        read_model_config(tmp_path, "transformers")
    message = str(caught.value)
    assert architecture in message
    assert "\n" not in message


def test_an_inner_size_of_each_layer_is_read(tmp_path):
    changes = {
        "intermediate_size": [48, 64], "head_dim": 8, "num_key_value_heads": 2,
        "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 4, "laurel_rank": 4,
        "vocab_size_per_layer_input": 97, "activation_sparsity_pattern": [0.0, 0.0],
        "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    config = small("Gemma3nTextConfig", **changes)
    config.architectures = ["Gemma3nForCausalLM"]
    config.save_pretrained(tmp_path)
    assert read_model_config(tmp_path, "transformers").intermediate_size == 64


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"vocab_size": "x"}, "read it: Field 'vocab_size' expected int, got str"),
        ({"layer_types": ["a"] * 2}, "read it: The `layer_types` entries must be in"),
        (
            {"text_config": {"model_type": "gemma3n_text"}},
            "holds text of model_type 'gemma3n_text'",
        ),
        (
            {"architectures": ["MiniMaxM3VLForCausalLM"], "layer_types": ["minimax_m3_sparse"] * 2},
            "has layers of kind minimax_m3_sparse",
        ),
        (
            {"architectures": ["Qwen2AudioModel"], "text_config": {"model_type": "qwen2"}},
            "holds text of model_type 'qwen2', beside parts that are not served",
        ),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "another model .* by --draft-model"),
        (
            {"architectures": ["Gemma4AssistantForCausalLM"], "text_config": {}},
            "guesses tokens for another model and is none itself; name its folder by --draft-model",
        ),
        # Layers that share a cache, without embeddings for each layer: transformers 5.23 fails.
        (
            {
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "num_hidden_layers": 4,
                "num_kv_shared_layers": 2,
                "hidden_size_per_layer_input": 0,
                "architectures": ["Gemma4ForCausalLM"],
                "model_type": "gemma4_text",
            },
            "ends with TypeError in .* of modeling_gemma4.py when",
        ),
    ],
)
def test_errors_of_transformers_are_one_line_without_its_internals(values, reason, tmp_path):
    config = {"architectures": ["Gemma3nForCausalLM"], "model_type": "gemma3n_text"}
    shape = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps({**config, **shape, **values}))
    with pytest.raises(ConfigError, match=reason) as caught:
        read_model_config(tmp_path, "transformers")
    message = str(caught.value)
    assert "\n" not in message
    assert "--model-impl" not in message


def test_code_in_a_checkpoint_is_never_run(tmp_path):
    (tmp_path / "model.py").write_text("raise SystemExit('ran')")
    values = {
        "architectures": ["OwnForCausalLM"],
        "model_type": "own",
        "auto_map": {"AutoModelForCausalLM": "model.OwnForCausalLM"},
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=r"'OwnForCausalLM' is no decoder .*never run"):
        read_model_config(tmp_path, "auto")


def test_sizes_that_take_too_long_to_build_are_refused(tmp_path):
    write_foreign_checkpoint(tmp_path, "OlmoForCausalLM")
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "num_hidden_layers": 10**7}))
    with pytest.raises(ConfigError, match="num_hidden_layers is 10000000; the limit is 1024"):
        read_model_config(tmp_path, "auto")


def test_pickled_weights_are_refused(tmp_path):
    write_foreign_checkpoint(tmp_path, "OlmoForCausalLM")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="holds neither"):
        load(tmp_path)


def test_ours_can_be_demanded(tmp_path):
    write_foreign_checkpoint(tmp_path, "OlmoForCausalLM")
    with pytest.raises(ConfigError, match="'OlmoForCausalLM' is not supported by --model-impl"):
        read_model_config(tmp_path, "octavo")


def test_each_of_our_architectures_names_a_class():
    assert all(issubclass(model_class(name), CausalLM) for name in OWN_ARCHITECTURES)


def test_a_family_of_ours_runs_its_own_modules_by_default(tmp_path):
    write_checkpoint(tmp_path, "llama")
    assert read_model_config(tmp_path, "auto") == ModelConfig.from_folder(tmp_path)
