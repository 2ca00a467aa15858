"""Models whose linear layers keep 4 bits on Hopper compute what dequantised ones do."""

import pytest
import torch

from models.layers.quantization import QuantizableLinear, can_run_packed
from models.loading.loader import load_model
from scripts.quantize_tiny import FORMATS, write_quantized
from tests.support.quantized_checkpoints import WIDE
from tests.support.random_checkpoints import write_checkpoint

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
SHAPE = WIDE | {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8}


@pytest.mark.parametrize(
    "form", ["awq", "gptq-act-order", "compressed-int4-channel", "modelopt-nvfp4", "quark-mxfp4"]
)
def test_layers_keep_4_bits_and_multiply_their_values(form, tmp_path):
    if not can_run_packed(CUDA, torch.bfloat16):
        pytest.skip("this GPU has no products of 4 bits")
    write_checkpoint(tmp_path / "plain", "llama", **SHAPE)
    write_quantized(tmp_path / "plain", tmp_path / "stored", FORMATS[form])
    kept, plain = (
        load_model(tmp_path / "stored", device=CUDA, dtype=torch.bfloat16, keep_quantized=is_kept)
        for is_kept in (None, False)
    )
    layers = [
        (path, layer)
        for path, layer in kept.named_modules()
        if isinstance(layer, QuantizableLinear)
    ]
    assert len(layers) == 8
    for path, layer in layers:
        assert layer.method.packing is not None
        for num_tokens in (1, 2, 7, 33, 64, 65, 300):
            x = torch.randn(num_tokens, 2 * layer.weight.shape[1], device=CUDA).bfloat16()
            expected = plain.get_submodule(path)(x)
            assert (layer(x) - expected).norm() <= 0.02 * expected.norm()
