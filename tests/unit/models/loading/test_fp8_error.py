"""Where the logits of FP8 products leave those of dequantised weights, and by how much.

A tiny model with weights as large as tests of logits use (standard deviation 0.3) is off by a
quarter: its attention scores are tens, so that rounding moves whole softmaxes, and tokens change
experts. These tests show that nothing but the rounding of activations does it.
"""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.layers.quantization import UNQUANTIZED, LinearMethod, QuantizableLinear
from models.loading.loader import load_model
from models.ops.experts import moe
from models.ops.products.fp8_linear import quantize
from tests.support.paged_runner import PagedRunner
from tests.support.quantized_checkpoints import BLOCK, WIDE, quantize_checkpoint
from tests.support.random_checkpoints import write_checkpoint

LARGE_STD = 0.3
"""Of the weights that `write_checkpoint` draws."""
FAMILIES = {
    "llama": {},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
    },
}


def load_pair(folder, family, std):
    """Returns models of the same FP8 checkpoint: dequantised, and with FP8 products."""
    plain, quantized = folder / "plain", folder / "fp8"
    quantized.mkdir()
    write_checkpoint(plain, family, **WIDE | FAMILIES[family])
    file = plain / "model.safetensors"
    factors = {name: std / LARGE_STD if "_proj" in name else 1.0 for name in load_file(file)}
    save_file({name: each * factors[name] for name, each in load_file(file).items()}, file)
    quantize_checkpoint(plain, quantized, "deepseek")
    return [
        load_model(quantized, device=torch.device("cpu"), dtype=torch.float32, keep_quantized=kept)
        for kept in (False, True)
    ]


def logits(model):
    runner = PagedRunner(model)
    return runner.run(runner.add([5, 96, 0, 48, 49, 17, 33, 80, 2, 61]), chunk_size=10)


def error(actual, exact):
    return float((actual - exact).norm() / exact.norm())


def round_activations(exact, kept):
    """Makes a dequantised model round what goes into the layers that another keeps in FP8."""

    def product(layer, x, bias):
        rounded, scales = quantize(x, BLOCK)
        x = rounded.float() * scales.repeat_interleave(BLOCK, 1)[:, : x.shape[1]]
        return torch.nn.functional.linear(x, layer.weight, bias)

    for path, layer in kept.named_modules():
        if isinstance(layer, QuantizableLinear) and layer.method is not UNQUANTIZED:
            exact.get_submodule(path).method = LinearMethod(product)


@pytest.mark.parametrize("std", [LARGE_STD, 0.06])
@pytest.mark.parametrize("family", FAMILIES)
def test_all_of_the_error_is_that_of_rounded_activations(tmp_path, family, std, monkeypatch):
    exact, kept = load_pair(tmp_path, family, std)
    actual = logits(kept)
    round_activations(exact, kept)
    apply = partial(moe.apply_experts, rounds_activations=True)

    def apply_rounded(*arguments, rounds_activations):
        assert not rounds_activations
        return apply(*arguments)

    monkeypatch.setattr(moe, "apply_experts", apply_rounded)
    assert error(actual, logits(exact)) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_of_a_trained_models_size_are_off_by_a_few_percent(tmp_path, family, monkeypatch):
    # 0.06 is 256 ** -0.5: what comes out of a product is as large as what goes in.
    exact, kept = load_pair(tmp_path, family, 0.06)
    choices = []
    route = moe.route

    def note(*arguments):
        choices.append(route(*arguments))
        return choices[-1]

    monkeypatch.setattr(moe, "route", note)
    expected = logits(exact)
    # A token that changes its expert is off by all of it, and that is no error of a product.
    monkeypatch.setattr(moe, "route", lambda *arguments: choices.pop(0))
    assert error(logits(kept), expected) < 0.08
