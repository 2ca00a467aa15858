"""The task of an engine: which models and flags go with it."""

import json
import shutil

import pytest
from pydantic import ValidationError

from models.config_sections.pooling import answers_of
from services.engine.checkpoint.hub_model import with_local_model
from services.engine.checkpoint.model_files import ModelFolderError
from services.engine.checkpoint.model_folder import ModelFolder
from services.engine.config.checkpoint import TINY_CHECKPOINT
from services.engine.config.engine_config import EngineConfig
from tests.support.tiktoken_folder import write_tiktoken_folder


def test_vectors_and_speculation_exclude_each_other():
    with pytest.raises(ValidationError, match="it must be 0 with --task embed"):
        EngineConfig.from_flags(task="embed", num_speculative_tokens=2)


def test_a_model_that_is_served_for_vectors_may_fill_its_context():
    generates, embeds = (
        ModelFolder.open(TINY_CHECKPOINT, name="tiny", max_model_len=64, task=task)
        for task in ("generate", "embed")
    )
    assert (generates.pooling, generates.max_prompt_len) == (None, 63)
    assert (embeds.pooling.method, embeds.max_prompt_len) == ("last", 64)


def test_a_model_without_the_answers_gives_no_scores():
    with pytest.raises(ModelFolderError, match="has no token 'no'"):
        ModelFolder.open(TINY_CHECKPOINT, name="tiny", max_model_len=None, task="score")


def test_answers_are_tokens_of_the_tokenizer_or_named(tmp_path):
    folder = write_tiktoken_folder(tmp_path / "ranks", {900: "no", 901: "yes"})
    config = with_local_model(EngineConfig.from_flags(model=folder, task="score"))
    assert config.checkpoint.score_tokens == [900, 901]
    chosen = EngineConfig.from_flags(model=folder, task="score", score_tokens=[5, 7])
    assert with_local_model(chosen).checkpoint.score_tokens == [5, 7]
    model = ModelFolder.open(
        folder, name="m", max_model_len=None, task="score", score_tokens=[900, 901]
    )
    assert model.pooling.answers == (900, 901)
    with pytest.raises(ModelFolderError, match=r"--score-tokens has 99999; the model has"):
        ModelFolder.open(
            folder, name="m", max_model_len=None, task="score", score_tokens=[0, 99999]
        )
    with pytest.raises(ValidationError, match="--score-tokens takes two ids"):
        EngineConfig.from_flags(task="score", score_tokens=[5])
    write_tiktoken_folder(tmp_path / "plain")
    with pytest.raises(ModelFolderError, match="has no token 'no'"):
        with_local_model(EngineConfig.from_flags(model=tmp_path / "plain", task="score"))


def test_answers_of_a_unigram_vocabulary_are_numbers_of_its_pieces(tmp_path):
    pieces = [["<unk>", 0.0], ["\u2581no", -1.5], 5, ["yes", -2.0]]
    content = json.dumps({"model": {"type": "Unigram", "vocab": pieces}}).encode()
    assert answers_of(content, tmp_path) == (1, 3)


def test_a_head_for_scores_needs_no_answers(tmp_path):
    folder = write_tiktoken_folder(tmp_path / "ranks")
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "A"}}
    (folder / "config.json").write_text(json.dumps(config))
    found = with_local_model(EngineConfig.from_flags(model=folder, task="score"))
    assert found.checkpoint.score_tokens == []


def test_a_model_without_a_head_is_not_served_to_generate(tmp_path):
    shutil.copytree(TINY_CHECKPOINT, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3Model"]}))
    with pytest.raises(ModelFolderError, match="serve it with --task embed"):
        ModelFolder.open(tmp_path, name="tiny", max_model_len=None)
    assert ModelFolder.open(tmp_path, name="tiny", max_model_len=None, task="embed").pooling
