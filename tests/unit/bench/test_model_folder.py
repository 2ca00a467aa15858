"""Folders for random weights of public shapes."""

import json

import pytest

from services.engine.core.model_folder import ModelFolder
from tests.bench.model_folder import make_model_folder, read_shape, shape_names


def test_shapes_are_the_public_models_and_the_embedded_one():
    assert shape_names() == ["tiny", "llama-3.1-8b", "qwen3-0.6b", "qwen3-30b-a3b", "qwen3-8b"]


def test_unknown_shape_is_refused_with_the_names_there_are():
    with pytest.raises(ValueError, match="there is no shape 'gpt-5'; there are tiny, llama"):
        read_shape("gpt-5")


@pytest.mark.parametrize("shape", ["tiny", "qwen3-0.6b", "llama-3.1-8b"])
def test_engine_takes_the_folder_and_every_token_has_a_text(shape, tmp_path):
    folder = make_model_folder(shape, tmp_path)
    model = ModelFolder.open(folder, name=shape, max_model_len=None)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(model.vocab_size))
    assert model.default_sampling.temperature == 0
