"""Weights of GGUF files have the values of `gguf`'s own dequantisation."""

import numpy as np
import pytest
import torch

from models.gguf.tensor_types import PLAIN_TYPES, TENSOR_TYPES
from models.layers.quantization import QuantizableLinear
from models.loading.checkpoint import CheckpointError, open_checkpoint
from models.loading.gguf_blocks import dequantize
from models.loading.loader import load_model
from models.number_formats import FP8
from services.engine.checkpoint.gguf_model import made_folder
from tests.support.gguf_files import gguf, random_blocks, write_gguf
from tests.support.paged_runner import PagedRunner
from tests.support.random_checkpoints import write_checkpoint

CPU = torch.device("cpu")
BLOCK_TYPES = {kind.name: kind for kind in TENSOR_TYPES.values() if kind.name not in PLAIN_TYPES}
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "head_dim": 64,
}


def dequantized(raw, kind):
    return torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]).copy())


def folder_of(path, kind, variant="llama", **options):
    write_checkpoint(path / "source", variant, **WIDE)
    write_gguf(path / "source", path / "model.gguf", kind=kind, **options)
    return made_folder((path / "model.gguf",), path / "made")


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_any_bytes_have_the_values_of_gguf(kind):
    type_ = BLOCK_TYPES[kind]
    raw = np.random.default_rng(0).integers(0, 256, (50, 3 * type_.num_bytes), np.uint8)
    with np.errstate(all="ignore"):
        expected = dequantized(raw, kind)
    values = dequantize(torch.from_numpy(raw), type_, torch.float32)
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_bfloat16_is_rounded_once(kind):
    raw = random_blocks((20, 512), kind)
    values = dequantize(torch.from_numpy(raw), BLOCK_TYPES[kind], torch.bfloat16)
    assert torch.equal(values, dequantized(raw, kind).to(torch.bfloat16))


@pytest.mark.parametrize("kind", [*PLAIN_TYPES, *BLOCK_TYPES])
def test_weights_of_a_file_are_those_of_gguf(kind, tmp_path):
    folder = folder_of(tmp_path, kind)
    reader = {each.name: each for each in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    stored = {each.name: each for each in open_checkpoint(folder)}
    model = load_model(folder, device=CPU, dtype=torch.float32)
    names = {
        "token_embd.weight": "model.embed_tokens",
        "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj",
    }
    for name, module in names.items():
        assert reader[name].tensor_type.name == kind
        assert f"{module}.weight" in stored
        expected = dequantized(reader[name].data, kind)
        assert torch.equal(model.get_submodule(module).weight, expected)
    formats = {each.stored for each in model.weight_formats}
    assert formats & {kind, str(torch.float32)[6:], "float16", "bfloat16"}


@pytest.mark.parametrize(("kind", "kept"), [("Q4_0", "int4"), ("Q8_0", "int8")])
@pytest.mark.parametrize("variant", ["llama", "qwen3_moe"])
def test_integers_stay_packed_where_that_is_exact(kind, kept, variant, tmp_path):
    folder = folder_of(tmp_path, kind, variant, has_random_blocks=True)
    packed = load_model(folder, device=CPU, dtype=torch.bfloat16, keep_quantized=True)
    assert any(each.kept.startswith(kept) for each in packed.weight_formats)
    plain = load_model(folder, device=CPU, dtype=torch.bfloat16, keep_quantized=False)
    tokens = list(range(20))
    logits = [
        PagedRunner(model).run(PagedRunner(model).add(tokens), 20) for model in (packed, plain)
    ]
    scale = logits[1].abs().max()
    assert (logits[0] - logits[1]).abs().max() <= 0.02 * scale


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_integers_become_the_models_dtype_where_packing_would_round(kind, tmp_path):
    model = load_model(
        folder_of(tmp_path, kind), device=CPU, dtype=torch.bfloat16, keep_quantized=True
    )
    assert {each.kept for each in model.weight_formats} == {"bfloat16"}


def test_weights_can_be_rounded_to_fp8(tmp_path):
    folder = folder_of(tmp_path, "Q6_K")
    model = load_model(
        folder, device=CPU, dtype=torch.float32, rounds_to_fp8=True, keep_quantized=True
    )
    linear = model.get_submodule("model.layers.0.mlp.down_proj")
    assert isinstance(linear, QuantizableLinear)
    assert linear.weight.dtype == FP8
    whole = load_model(folder, device=CPU, dtype=torch.float32)
    exact = whole.get_submodule("model.layers.0.mlp.down_proj").weight
    error = linear.weight.float() * linear.weight_scale - exact
    assert error.abs().max() <= exact.abs().max() / 16


def test_a_matrix_of_another_shape_is_refused(tmp_path):
    write_checkpoint(tmp_path / "source", "llama", **WIDE)
    write_gguf(tmp_path / "source", tmp_path / "model.gguf", kind="Q8_0", feed_forward_length=128)
    folder = made_folder((tmp_path / "model.gguf",), tmp_path / "made")
    with pytest.raises(CheckpointError, match="shape"):
        load_model(folder, device=CPU, dtype=torch.float32)
