"""Models that have no room for the default number of requests run fewer, not none."""

import json
import shutil

import pytest

from models.loading.model_config import read_model_config
from services.engine.checkpoint.fitting_requests import FEWER_SEQS, with_fitting_requests
from services.engine.checkpoint.model_files import ModelFolderError
from services.engine.config.checkpoint import TINY_CHECKPOINT
from services.engine.config.engine_config import EngineConfig
from tests.support.vision_variants import write_vision_checkpoint

DEFAULT = EngineConfig().scheduler.max_num_seqs


def fitted(folder, **flags):
    config = EngineConfig.from_flags(**flags)
    model = read_model_config(folder, config.checkpoint.model_impl, sees_images=True)
    return with_fitting_requests(config, model).scheduler.max_num_seqs


@pytest.fixture
def long_model(tmp_path):
    """A model of a million tokens whose heads have 128 elements, as Qwen2.5's have."""
    folder = shutil.copytree(TINY_CHECKPOINT, tmp_path / "model")
    path = folder / "config.json"
    changes = {"max_position_embeddings": 1_010_000, "head_dim": 128}
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def test_sequences_of_a_million_tokens_are_served_without_flags(long_model):
    assert fitted(long_model) == FEWER_SEQS
    assert fitted(long_model, max_model_len=4096) == DEFAULT


def test_images_are_served_beside_drafts_without_flags(tmp_path):
    write_vision_checkpoint(tmp_path, "gemma3")
    assert fitted(tmp_path) == DEFAULT
    drafts = {"speculative_method": "ngram", "num_speculative_tokens": 4}
    assert fitted(tmp_path, **drafts) == DEFAULT
    assert fitted(tmp_path, **drafts, max_num_batched_tokens=2048) == FEWER_SEQS


def test_what_fits_neither_number_is_refused_with_the_flags_that_were_given(long_model):
    flags = {"max_model_len": 10_000_000}
    edited = json.loads((long_model / "config.json").read_text())
    edited["max_position_embeddings"] = 10_000_000
    (long_model / "config.json").write_text(json.dumps(edited))
    with pytest.raises(ModelFolderError, match=f"tables for {DEFAULT} requests"):
        fitted(long_model, **flags)
    with pytest.raises(ModelFolderError, match="tables for 500 requests"):
        fitted(long_model, max_num_seqs=500, max_model_len=1_010_000)
