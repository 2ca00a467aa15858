"""Checkpoints as their publishers wrote them load, dequantised and kept."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.loading.loader import load_model
from scripts.quantize_tiny import WEIGHTS, write_plain, write_quantized
from tests.support.published_checkpoints import PUBLISHED
from tests.support.quantized_checkpoints import WIDE
from tests.support.random_checkpoints import write_checkpoint

SIZES = {
    "qwen3_moe": {"moe_intermediate_size": 256, "num_experts": 4},
    "mixtral": {"num_local_experts": 3},
    "deepseek_v3": {
        "num_key_value_heads": 4, "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64, "v_head_dim": 64, "moe_intermediate_size": 128,
        "num_hidden_layers": 2,
    },
}  # fmt: skip
each_form = pytest.mark.parametrize("name", PUBLISHED)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Returns a function from a family to a random checkpoint of it."""
    folders = {}

    def source(variant, **sizes):
        key = variant, *sizes.items()
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp(variant)
            write_checkpoint(folders[key], variant, **WIDE | SIZES.get(variant, {}) | sizes)
        return folders[key]

    return source


@pytest.fixture
def written(source, tmp_path):
    """Returns a function that writes a form; returns its folder and that of its values."""

    def written(name):
        published = PUBLISHED[name]
        folder = source(published.variant, **published.sizes)
        stored, plain = tmp_path / "stored", tmp_path / "plain"
        values = write_quantized(folder, stored, published.form)
        tensors = published.edit(load_file(stored / WEIGHTS))
        save_file({each: tensors[each].contiguous() for each in tensors}, stored / WEIGHTS)
        write_plain(folder, plain, values)
        return stored, plain

    return written


def load(folder, **options):
    return load_model(folder, device=torch.device("cpu"), dtype=torch.float32, **options)


@each_form
def test_dequantised_weights_have_their_values(written, name):
    stored, plain = written(name)
    expected = load(plain).state_dict()
    for each, value in load(stored).state_dict().items():
        torch.testing.assert_close(value, expected[each], rtol=1e-6, atol=1e-7, msg=each)


@each_form
def test_weights_are_kept_as_stored(written, name):
    stored, _ = written(name)
    kept = load(stored, keep_quantized=True).weight_formats
    assert PUBLISHED[name].kept in {each.kept for each in kept}
