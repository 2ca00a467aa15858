"""sentence-transformers' files, and refusals of what they may hold."""

import json

import pytest

from models.config import ConfigError, ModelConfig
from models.config_sections.pooling import PoolingConfig, read_pooling
from tests.support.random_checkpoints import write_checkpoint

TRANSFORMER = {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}


def write(folder, modules, pooling=None):
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling or {}))


def test_a_folder_without_files_takes_the_last_token_normalised(tmp_path):
    assert read_pooling(tmp_path, "embed") == PoolingConfig(task="embed", is_normalized=True)


def test_prompts_and_the_longest_input_are_read(tmp_path):
    write(tmp_path, [TRANSFORMER, POOLING], {"pooling_mode": "mean"})
    prompts = {"prompts": {"query": "q: ", "document": ""}, "default_prompt_name": "query"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 512}))
    pooling = read_pooling(tmp_path, "embed")
    assert (pooling.method, pooling.is_normalized, pooling.max_input_tokens) == ("mean", False, 512)
    assert pooling.prompts == (("document", ""), ("query", "q: "))
    assert pooling.default_prompt_name == "query"


@pytest.mark.parametrize(
    ("modules", "pooling", "message"),
    [
        ({}, {}, "does not hold a list of modules"),
        ([TRANSFORMER], {}, "has no module Pooling"),
        ([TRANSFORMER, {"path": "x"}], {}, "has no type or no path"),
        ([{**POOLING, "path": "../1_Pooling"}], {}, "leaves the checkpoint's folder"),
        ([{**POOLING, "path": "/1_Pooling"}], {}, "leaves the checkpoint's folder"),
        ([TRANSFORMER, {**POOLING, "type": "x.LSTM"}], {}, "the module LSTM is not served"),
        ([POOLING], {"pooling_mode_max_tokens": True}, "pooling of max is not served"),
        ([POOLING], {}, "pooling of nothing is not served"),
        ([POOLING], {"pooling_mode": "mean", "include_prompt": False}, "include_prompt is False"),
        (
            [POOLING],
            {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True},
            "pooling of lasttoken and mean is not served",
        ),
    ],
)
def test_unserved_modules_are_refused(tmp_path, modules, pooling, message):
    write(tmp_path, modules, pooling)
    with pytest.raises(ConfigError, match=message):
        read_pooling(tmp_path, "embed")


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ({"prompts": {"a": 3}}, "prompts is"),
        ({"prompts": []}, "prompts is"),
        ({"prompts": {}, "default_prompt_name": "a"}, "default_prompt_name is 'a'"),
    ],
)
def test_broken_prompts_are_refused(tmp_path, prompts, message):
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    with pytest.raises(ConfigError, match=message):
        read_pooling(tmp_path, "embed")


@pytest.mark.parametrize("content", ["", "[]", '{"model": {"vocab": {"yes": "1", "no": 2}}}'])
def test_scores_need_the_tokens_yes_and_no(tmp_path, content):
    write_checkpoint(tmp_path, "qwen3")
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        read_pooling(tmp_path, "score")


def test_words_with_their_space_are_answers_where_there_are_no_others(tmp_path):
    write_checkpoint(tmp_path, "qwen3")
    vocabulary = {"\u2581no": 4, "yes": 5, "\u2581yes": 6}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    assert read_pooling(tmp_path, "score").answers == (4, 5)
    assert read_pooling(tmp_path, "score", (8, 9)).answers == (8, 9)


def test_a_decoder_without_a_head_generates_nothing(tmp_path):
    write_checkpoint(tmp_path, "qwen3")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3Model"]}))
    config = ModelConfig.from_folder(tmp_path)
    assert config.architecture == "Qwen3ForCausalLM"
    with pytest.raises(ConfigError, match="has no head that chooses tokens"):
        config.require_head()
