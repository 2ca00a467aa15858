"""Models whose layers and experts stay packed on Hopper compute what dequantised ones do."""

import pytest
import torch

from models.layers.quantization import QuantizableLinear, can_run_packed
from models.loading.loader import load_model
from models.operands.packed_weights import num_columns
from scripts.quantize_tiny import FORMATS, write_quantized
from tests.support.quantized_checkpoints import LAYER_FORMS, WIDE
from tests.support.random_checkpoints import write_checkpoint

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
SHAPE = WIDE | {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8}
EXPERTS_ERROR = 0.01
"""Relative to the norm. Kept weights have scales in bfloat16, dequantised ones values."""
TOKENS = (1, 2, 7, 33, 64, 65, 300)


@pytest.fixture
def load_both(tmp_path):
    """Returns a function that loads a format of a family: as it is kept, and dequantised."""
    if not can_run_packed(CUDA, torch.bfloat16):
        pytest.skip("this GPU has no products of 4 bits")

    def load_both(form, variant, **sizes):
        write_checkpoint(tmp_path / "plain", variant, **SHAPE | sizes)
        write_quantized(tmp_path / "plain", tmp_path / "stored", FORMATS[form])
        options = {"device": CUDA, "dtype": torch.bfloat16}
        return [
            load_model(tmp_path / "stored", keep_quantized=is_kept, **options)
            for is_kept in (None, False)
        ]

    return load_both


@pytest.mark.parametrize("form", LAYER_FORMS)
def test_layers_stay_packed_and_multiply_their_values(form, load_both):
    kept, plain = load_both(form, "llama")
    layers = [
        (path, layer)
        for path, layer in kept.named_modules()
        if isinstance(layer, QuantizableLinear)
    ]
    assert len(layers) == 8
    for path, layer in layers:
        assert layer.method.packing is not None
        for num_tokens in TOKENS:
            x = torch.randn(num_tokens, num_columns(layer.weight), device=CUDA).bfloat16()
            expected = plain.get_submodule(path)(x)
            assert (layer(x) - expected).norm() <= 0.02 * expected.norm()


# Whole models amplify the rounding of random layers, so each layer gets inputs of its own.
@pytest.mark.parametrize(
    "form",
    [
        "awq",
        "awq-no-zeros",
        "gptq",
        "gptq-zeros",
        "gptq-channel",
        "compressed-int4-32",
        "quark-mxfp4",
        "modelopt-nvfp4",
    ],
)
@pytest.mark.parametrize(
    ("variant", "sizes"),
    [
        ("qwen3_moe", {"moe_intermediate_size": 192}),
        ("qwen3_moe", {"moe_intermediate_size": 512}),
        ("mixtral", {"intermediate_size": 1024}),
    ],
)
def test_experts_keep_4_bits_and_multiply_their_values(form, variant, sizes, load_both):
    kept, plain = load_both(form, variant, **sizes)
    for own, other in zip(kept.model.layers, plain.model.layers, strict=True):
        assert own.mlp.experts.packing is not None
        for num_tokens in TOKENS:
            x = torch.randn(num_tokens, SHAPE["hidden_size"], device=CUDA).bfloat16()
            expected = other.mlp(x)
            assert (own.mlp(x) - expected).norm() <= EXPERTS_ERROR * expected.norm()
