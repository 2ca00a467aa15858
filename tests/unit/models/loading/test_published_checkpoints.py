"""Checkpoints as their publishers wrote them load, dequantised and kept."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.loading.loader import load_model
from scripts.quantize_tiny import WEIGHTS, write_plain, write_quantized
from tests.support.published_checkpoints import PUBLISHED

each_form = pytest.mark.parametrize("name", PUBLISHED)


@pytest.fixture
def written(wide_source, tmp_path):
    """Returns a function that writes a form; returns its folder and that of its values."""

    def written(name):
        published = PUBLISHED[name]
        folder = wide_source(published.variant, **published.sizes)
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
