"""Every family gets its fusions, and computes what transformers does."""

import pytest
import torch

from models.config_sections.families import OWN_ARCHITECTURES
from models.loading.loader import load_model
from scripts.quantize_tiny import FORMATS, write_quantized
from tests.support.compiled_models import compile_at
from tests.support.paged_runner import PagedRunner
from tests.support.quantized_checkpoints import KINDS, WIDE, WIDE_STATES, quantize_checkpoint
from tests.support.random_checkpoints import VARIANTS, transformers_logits, write_checkpoint
from tests.support.recent_variants import RECENT_VARIANTS

TOKENS = [5, 17, 3, 44, 2, 9, 9, 31, 60, 7, 8, 1, 90]
DENSE = {"linear_gate": 2, "linear_residual": 4, "norm_linear": 4, "qk_norm_rope_cache": 2}
SPARSE = {"linear_residual": 2, "residual_norm": 2, "norm_linear": 1, "qk_norm_rope_cache": 2}
LATENT = {"linear_gate": 3, "multi_stream": 2, "linear_residual": 4, "residual_norm": 2}
DELTA_NET = {
    "linear_gate": 4,
    "multi_stream": 4,
    "linear_residual": 4,
    "residual_norm": 4,
    "qk_norm_rope_cache": 1,
}
# Layers: 2 by default, 3 with experts of which the first is dense, and 3 of gpt_oss.
MATCHES = {
    "llama": DENSE,
    "llama_bias": DENSE,
    "mistral_window": DENSE,
    "internlm3": DENSE,
    "phi3_partial_rotary": DENSE,
    "phi3_long": DENSE,
    "seed_oss": DENSE,
    "ernie4_5": DENSE,
    # One layer of five has no positions.
    "smollm3": {
        "linear_gate": 5,
        "linear_residual": 10,
        "norm_linear": 10,
        "qk_norm_rope_cache": 4,
    },
    # Layers: 3 with two sums each. The first norm reads no sum.
    "gemma2": {"residual_norm": 6, "norm_linear": 1, "qk_norm_rope_cache": 3},
    "gemma3": {"residual_norm": 6, "norm_linear": 1, "qk_norm_rope_cache": 3},
    "granite": {"linear_gate": 2, "residual_norm": 4, "norm_linear": 1, "qk_norm_rope_cache": 2},
    # The model's last norm is the only one that reads a sum.
    "olmo2": {"linear_gate": 2, "residual_norm": 1, "qk_norm_rope_cache": 2},
    "olmo3": {"linear_gate": 5, "residual_norm": 1, "qk_norm_rope_cache": 5},
    # Two layers of six see all keys and have no positions.
    "exaone4": {"linear_gate": 6, "residual_norm": 1, "qk_norm_rope_cache": 4},
    "qwen2": DENSE,
    "qwen2_moe": {**SPARSE, "linear_gate": 2, "multi_stream": 2},
    "qwen3": DENSE,
    "qwen3_moe": SPARSE,
    "mixtral": SPARSE,
    # One layer of four has attention; two products read the norm before a state's layer.
    "qwen3_next": DELTA_NET,
    "qwen3_5_moe": DELTA_NET,
    "qwen3_5": {
        "linear_gate": 4,
        "linear_residual": 8,
        "norm_linear": 5,
        "qk_norm_rope_cache": 1,
    },
    # Attention of these has no positions; sub-layers' outputs are scaled before they are added.
    "granite_hybrid": {"linear_gate": 4, "multi_stream": 4, "residual_norm": 8},
    "falcon_h1": {"residual_norm": 4, "qk_norm_rope_cache": 2},
    "mamba2": {"linear_residual": 2},
    "lfm2": {
        "linear_gate": 4,
        "linear_residual": 8,
        "norm_linear": 5,
        "qk_norm_rope_cache": 1,
    },
    "lfm2_moe": {
        "linear_gate": 1,
        "linear_residual": 5,
        "residual_norm": 3,
        "norm_linear": 1,
        "qk_norm_rope_cache": 1,
    },
    # Layers have one part each.
    "nemotron_h": {"linear_residual": 5, "norm_linear": 3},
    # One layer of four has norms after its parts.
    "olmo_hybrid": {
        "linear_gate": 4,
        "linear_residual": 6,
        "residual_norm": 1,
        "norm_linear": 3,
        "qk_norm_rope_cache": 1,
    },
    "kimi_linear": {
        "linear_gate": 4,
        "multi_stream": 3,
        "linear_residual": 5,
        "residual_norm": 3,
        "norm_linear": 1,
    },
    "bailing_hybrid": {
        "linear_gate": 4,
        "multi_stream": 2,
        "linear_residual": 6,
        "residual_norm": 2,
        "norm_linear": 2,
        "qk_norm_rope_cache": 2,
    },
    "minimax": {"residual_norm": 6, "qk_norm_rope_cache": 1},
    "gpt_oss": {**SPARSE, "linear_residual": 3, "residual_norm": 3, "qk_norm_rope_cache": 3},
    "glm4_moe": {**LATENT, "norm_linear": 3, "qk_norm_rope_cache": 3},
    # Compressed queries are normalised before their product: one match more in each layer.
    "deepseek_v2": {**LATENT, "norm_linear": 6, "qk_norm_rope_cache": 3},
    "deepseek_v3": {**LATENT, "norm_linear": 6, "qk_norm_rope_cache": 3},
    # An index also reads what the norms before it return.
    "deepseek_v32": {**LATENT, "norm_linear": 1, "qk_norm_rope_cache": 3},
    "apertus": {"linear_residual": 4, "norm_linear": 4, "qk_norm_rope_cache": 2},
    # One layer of four has no positions.
    "cohere2": {"linear_gate": 4, "linear_residual": 8, "qk_norm_rope_cache": 3},
    "gemma4": {"residual_norm": 4, "norm_linear": 4, "qk_norm_rope_cache": 4},
    "gemma4_moe": {"residual_norm": 8, "norm_linear": 8, "qk_norm_rope_cache": 4},
    # Half of the layers share the cache of others.
    "gemma4_shared": {"residual_norm": 6, "norm_linear": 6, "qk_norm_rope_cache": 3},
    "gemma4_unified": {"residual_norm": 4, "norm_linear": 4, "qk_norm_rope_cache": 4},
    "glm4": {"linear_gate": 2, "residual_norm": 4, "norm_linear": 1, "qk_norm_rope_cache": 2},
    "glm4_moe_lite": {**LATENT, "norm_linear": 6, "qk_norm_rope_cache": 3},
    "glm_moe_dsa": {**LATENT, "norm_linear": 1, "qk_norm_rope_cache": 3},
    # Two layers of five have an index.
    "glm_moe_dsa_shared": {
        "linear_gate": 5,
        "multi_stream": 4,
        "linear_residual": 6,
        "residual_norm": 4,
        "norm_linear": 5,
        "qk_norm_rope_cache": 5,
    },
    "hy_v3": {
        "linear_gate": 2,
        "multi_stream": 1,
        "linear_residual": 3,
        "residual_norm": 1,
        "norm_linear": 3,
        "qk_norm_rope_cache": 2,
    },
    # Hyper-connections add outputs to streams.
    "hy_v4": {"linear_gate": 4, "multi_stream": 3, "norm_linear": 3, "qk_norm_rope_cache": 4},
    # One layer of four has no positions.
    "llama4": {
        "linear_gate": 4,
        "linear_residual": 8,
        "residual_norm": 4,
        "norm_linear": 1,
        "qk_norm_rope_cache": 3,
    },
    "deepseek_v4": {"linear_residual": 4, "norm_linear": 3},
    "mimo_v2": {**SPARSE, "linear_gate": 1, "linear_residual": 4, "qk_norm_rope_cache": 3},
    "minimax_m2": SPARSE,
    # One layer of three attends to all keys; a clamped gate is no kernel of ours.
    "minimax_m3": {
        "linear_residual": 6,
        "residual_norm": 2,
        "norm_linear": 2,
        "qk_norm_rope_cache": 1,
    },
    "ministral3": DENSE,
    "mistral4": {**LATENT, "norm_linear": 6, "qk_norm_rope_cache": 3},
    "solar_open": {**SPARSE, "linear_gate": 2, "multi_stream": 2},
}


def test_every_architecture_is_here(tmp_path):
    tested = {VARIANTS[variant][0].__name__ for variant in MATCHES if variant in VARIANTS}
    tested |= {"InternLM3ForCausalLM", "DeepseekV32ForCausalLM"}
    # Others without a class in transformers, each the same as one above.
    tested |= {"MistralLarge3ForCausalLM", "Qwen3VLMoeForCausalLM"}
    assert tested >= OWN_ARCHITECTURES.keys()


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(name, marks=pytest.mark.families) if name in RECENT_VARIANTS else name
        for name in MATCHES
        if name in VARIANTS
    ],
)
def test_a_family_is_fused_and_computes_what_transformers_does(variant, tmp_path):
    reference = write_checkpoint(tmp_path, variant)
    model = load_model(tmp_path, device=torch.device("cpu"), dtype=torch.float32)
    matches = compile_at(3)(model).pass_matches
    found = {name: count for name, count in matches.items() if count and name != "clean_up"}
    assert found == MATCHES[variant]
    assert model.expected_passes() <= found.keys()
    runner = PagedRunner(model)
    logits = runner.run(runner.add(TOKENS), 5)
    expected = transformers_logits(reference, TOKENS)
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_8_bits_are_fused_like_others(kind, tmp_path):
    plain, folder = tmp_path / "plain", tmp_path / "quantized"
    write_checkpoint(plain, "llama", **WIDE)
    folder.mkdir()
    quantize_checkpoint(plain, folder, kind)

    def logits(*, is_compiled):
        model = load_model(
            folder, device=torch.device("cpu"), dtype=torch.bfloat16, keep_quantized=True
        )
        found = compile_at(3)(model).pass_matches if is_compiled else {}
        runner = PagedRunner(model)
        return found, runner.run(runner.add(TOKENS), 5)

    found, actual = logits(is_compiled=True)
    # A gate and the products around it are one operator in each of two layers.
    assert (DENSE | {"activation_quant": 2}).items() <= found.items()
    _, expected = logits(is_compiled=False)
    assert (actual - expected).norm() <= 0.02 * expected.norm()


@pytest.mark.parametrize("form", ["fp8-block", "compressed-fp8-channel", "modelopt-nvfp4"])
@pytest.mark.parametrize("variant", ["qwen3_5", "nemotron_h_moe"])
def test_quantised_layers_with_states_compute_the_same_in_pieces(variant, form, tmp_path):
    write_checkpoint(tmp_path / "plain", variant, **WIDE | WIDE_STATES[variant])
    write_quantized(tmp_path / "plain", tmp_path / "stored", FORMATS[form])

    def logits(*, is_compiled):
        model = load_model(
            tmp_path / "stored", device=torch.device("cpu"), dtype=torch.float32,
            keep_quantized=True,
        )  # fmt: skip
        found = compile_at(3)(model).pass_matches if is_compiled else {}
        assert not is_compiled or model.expected_passes() <= found.keys()
        runner = PagedRunner(model)
        return runner.run(runner.add(TOKENS), 5)

    assert torch.equal(logits(is_compiled=True), logits(is_compiled=False))


@pytest.mark.parametrize(
    ("variant", "kind", "head_dim", "count"),
    [
        *((variant, "deepseek", 128, 2) for variant in ("llama", "granite", "qwen3_moe", "olmo2")),
        ("glm4_moe", "deepseek", 128, 3),
        ("gemma2", "deepseek", 128, 3),
        ("llama_bias", "compressed_block", 128, 2),
        # A scale needs several heads, or the heads of a token, or half of one.
        ("llama", "deepseek", 64, 0),
        ("llama", "compressed_channel", 128, 0),
        ("llama", "deepseek", 256, 0),
    ],
)
def test_attention_rounds_its_output_for_weights_by_block(variant, kind, head_dim, count, tmp_path):
    plain, folder = tmp_path / "plain", tmp_path / "quantized"
    write_checkpoint(plain, variant, **WIDE | {"head_dim": head_dim})
    folder.mkdir()
    quantize_checkpoint(plain, folder, kind)

    def logits(disabled):
        cpu = torch.device("cpu")
        model = load_model(folder, device=cpu, dtype=torch.bfloat16, keep_quantized=True)
        found = compile_at(3, disable_pass=disabled)(model).pass_matches
        runner = PagedRunner(model)
        # Chunks of several tokens, and one token alone, whose output attention leaves as it is.
        sequence = runner.add(TOKENS)
        return found, runner.run(sequence, 6)

    found, actual = logits([])
    assert found["attention_quant"] == count
    without, expected = logits(["attention_quant"])
    assert "attention_quant" not in without
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("kind", ["deepseek", "compressed_channel"])
def test_norms_after_other_sums_take_part_in_products_of_8_bits(kind, tmp_path):
    plain, folder = tmp_path / "plain", tmp_path / "quantized"
    write_checkpoint(plain, "granite", **WIDE)
    folder.mkdir()
    quantize_checkpoint(plain, folder, kind)
    logits = []
    for level in (3, 0):
        model = load_model(
            folder, device=torch.device("cpu"), dtype=torch.bfloat16, keep_quantized=True
        )
        matches = compile_at(level)(model).pass_matches if level else {}
        # Two layers have four sums; the last norm comes before the head, which has no FP8 weight.
        assert matches.get("norm_quant", 3) == 3
        runner = PagedRunner(model)
        logits.append(runner.run(runner.add(TOKENS), 5))
    assert (logits[0] - logits[1]).norm() <= 0.02 * logits[1].norm()


@pytest.mark.parametrize(
    ("form", "variant", "level"),
    [
        *(("awq", "llama", level) for level in (1, 2, 3)),
        ("gptq-act-order", "llama_bias", 3),
        ("modelopt-nvfp4", "qwen3", 3),
        ("compressed-mixed", "llama", 3),
        ("quark-mxfp4", "deepseek_v3", 3),
        ("awq", "deepseek_v3", 3),
    ],
)
def test_weights_of_4_bits_get_their_gate_and_run_at_every_level(form, variant, level, tmp_path):
    plain, folder = tmp_path / "plain", tmp_path / "quantized"
    latent = {"num_key_value_heads": 4, "q_lora_rank": 128, "kv_lora_rank": 64,
              "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64,
              "moe_intermediate_size": 128}  # fmt: skip
    write_checkpoint(plain, variant, **WIDE | (latent if variant == "deepseek_v3" else {}))
    write_quantized(plain, folder, FORMATS[form])

    def load():
        cpu = torch.device("cpu")
        return load_model(folder, device=cpu, dtype=torch.float32, keep_quantized=True)

    model = load()
    stats = compile_at(level)(model)
    if level == 3:
        found = {name for name, count in stats.pass_matches.items() if count}
        assert model.expected_passes() <= found
        assert "linear_gate" in found
    logits = []
    for each in (model, load()):
        runner = PagedRunner(each)
        logits.append(runner.run(runner.add(TOKENS), 5))
    assert (logits[0] - logits[1]).norm() <= 1e-4 * logits[1].norm()
