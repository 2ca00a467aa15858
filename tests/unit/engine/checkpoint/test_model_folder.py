"""Files of a checkpoint's folder that the service reads."""

import hashlib
import json

import pytest

from services.engine.checkpoint.model_files import ModelFolderError
from services.engine.checkpoint.model_folder import DefaultSampling, ModelFolder

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 1024,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def read(folder, *, max_model_len=None):
    return ModelFolder.open(folder, name="m", max_model_len=max_model_len)


def with_generation(folder, **fields):
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return read(folder)


def test_limits_and_names_come_from_config_json(folder):
    model = read(folder)
    assert model.name == "m"
    assert model.architecture == "Qwen3ForCausalLM"
    assert (model.vocab_size, model.max_model_len) == (1024, 2048)
    assert model.eos_token_ids == {2}


@pytest.mark.parametrize(
    ("end", "ids"),
    [
        ("<|im_end|>", {2, 7}),
        ({"content": "<|im_end|>", "special": True}, {2, 7}),
        ("</s>", {2, 5}),
        ("<far>", {2}),  # above the model's vocabulary
        ("<other>", {2}),
        (None, {2}),
    ],
)
def test_the_tokenizers_own_end_ends_a_sequence_too(folder, end, ids):
    added = [{"id": 7, "content": "<|im_end|>"}, {"id": 1024, "content": "<far>"}]
    content = {"model": {"vocab": {"</s>": 5}}, "added_tokens": added}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    assert read(folder).eos_token_ids == ids


def test_a_broken_tokenizer_config_names_no_end(folder):
    (folder / "tokenizer_config.json").write_text("[")
    assert read(folder).eos_token_ids == {2}


def test_a_smaller_context_can_be_asked_for(folder):
    assert read(folder, max_model_len=100).max_model_len == 100


def test_a_larger_context_than_the_models_is_an_error(folder):
    with pytest.raises(
        ModelFolderError, match="--max-model-len is 4096; the model's limit is 2048"
    ):
        read(folder, max_model_len=4096)


def test_a_model_without_draft_layers_cannot_guess_ahead(folder):
    with pytest.raises(ModelFolderError, match="the model is Qwen3ForCausalLM"):
        ModelFolder.open(folder, name="m", max_model_len=None, num_layer_drafts=1)


@pytest.mark.parametrize(("stated", "ids"), [(7, {7}), ([7, 8], {7, 8})])
def test_generation_config_knows_the_end_ids_better(folder, stated, ids):
    assert with_generation(folder, eos_token_id=stated).eos_token_ids == ids


def test_a_silent_folder_has_neutral_sampling(folder):
    assert read(folder).default_sampling == DefaultSampling()


def test_do_sample_false_means_greedy(folder):
    model = with_generation(folder, do_sample=False, temperature=0.7)
    assert model.default_sampling.temperature == 0


def test_sampling_stated_by_the_folder_is_the_default(folder):
    model = with_generation(
        folder, do_sample=True, temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.1
    )
    assert model.default_sampling == DefaultSampling(
        temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.1
    )


def test_tokenizer_files_come_in_the_order_of_their_names_with_one_hash(folder):
    (folder / "chat_template.jinja").write_bytes(b"hello")
    tokenizer = read(folder).tokenizer
    assert [file.name for file in tokenizer.files] == ["chat_template.jinja", "tokenizer.json"]
    expected = hashlib.sha256(
        b"chat_template.jinja\0\5\0\0\0\0\0\0\0hello" + b"tokenizer.json\0\2\0\0\0\0\0\0\0{}"
    )
    assert tokenizer.sha256 == expected.hexdigest()


@pytest.mark.parametrize(
    ("file_name", "content", "message"),
    [
        ("config.json", None, r"config\.json cannot be read"),
        ("config.json", json.dumps({**CONFIG, "vocab_size": "x"}), "vocab_size is 'x'"),
        ("config.json", json.dumps({**CONFIG, "head_dim": 0}), "head_dim is"),
        ("generation_config.json", "{", r"generation_config\.json cannot be read"),
        ("generation_config.json", "[]", "does not hold a JSON object"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id is 'x'"),
        ("generation_config.json", '{"eos_token_id": [2, 1024]}', r"eos_token_id is \[2, 1024\]"),
        ("generation_config.json", json.dumps({"eos_token_id": [*range(65)]}), "may have 64 ids"),
        ("generation_config.json", '{"eos_token_id": true}', "eos_token_id is True"),
        ("generation_config.json", '{"eos_token_id": [2, false]}', r"eos_token_id is \[2, False\]"),
        ("generation_config.json", '{"do_sample": 0}', "do_sample is 0"),
        ("generation_config.json", '{"top_k": 2.5}', "top_k is 2.5"),
        ("generation_config.json", '{"top_p": "high"}', "top_p is 'high'"),
        ("generation_config.json", '{"temperature": 200}', "temperature is 200.0; it must be in"),
        ("tokenizer.json", None, "has no tokenizer.json"),
    ],
)
def test_a_broken_folder_is_named_with_what_is_wrong(folder, file_name, content, message):
    path = folder / file_name
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    with pytest.raises(ModelFolderError, match=message):
        read(folder)


def test_a_folder_that_does_not_exist_is_an_error(tmp_path):
    with pytest.raises(ModelFolderError, match="is not a folder"):
        read(tmp_path / "nowhere")
