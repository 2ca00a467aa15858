"""Hostile files of a model folder end the start with one clear line, and little is read."""

import json
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.config import ModelConfig
from services.engine.checkpoint.model_files import ModelFolderError
from services.engine.checkpoint.model_folder import ModelFolder
from services.engine.checkpoint.table_memory import MAX_TABLE_BYTES, check_table_memory
from services.engine.checkpoint.tokenizer_files import MAX_TOKENS_BEYOND, TOKENIZER_FILE_BYTES
from services.engine.config.checkpoint import TINY_CHECKPOINT
from services.engine.config.engine_config import EngineConfig

VOCAB_SIZE = 1024
HOSTILE = st.one_of(
    st.sampled_from([-1, 0, 1, 2**31, 2**40, 2**64, 10**400, 1e300, float("inf"), float("nan")]),
    st.sampled_from([True, None, "8", [], [2**31], {}, "x" * 5000, list(range(5000))]),
)


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(TINY_CHECKPOINT, tmp_path / "model")


def open_folder(folder, **limits):
    config = EngineConfig.from_flags(model=folder, **limits)
    model = ModelFolder.open(folder, name="m", max_model_len=config.checkpoint.max_model_len)
    check_table_memory(config, ModelConfig.from_folder(folder))
    return model


def edit(path, **changes):
    values = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(values | changes))


def refusal(folder, **limits):
    with pytest.raises(ModelFolderError) as caught:
        open_folder(folder, **limits)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 1000
    return message


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_value_of_a_field_ends_in_a_model_or_in_one_line(folder, file, data):
    sound = json.loads((TINY_CHECKPOINT / file).read_text())
    extra = ["temperature", "top_k", "top_p", "min_p", "repetition_penalty", "eos_token_id"]
    name = data.draw(st.sampled_from(sorted({*sound, *extra})))
    (folder / file).write_text(json.dumps(sound | {name: data.draw(HOSTILE)}))
    try:
        model = open_folder(folder)
    except ModelFolderError as error:
        message = str(error)
    else:
        message = ""
        assert all(token_id < model.vocab_size for token_id in model.eos_token_ids)
    assert "\n" not in message
    assert len(message) < 1000


def test_tables_for_endless_sequences_are_refused_with_the_flags_that_help(folder):
    edit(folder / "config.json", max_position_embeddings=2**31 - 1)
    message = refusal(folder)
    assert f"of {2**31 - 1} tokens" in message
    assert str(MAX_TABLE_BYTES) in message
    assert "--max-model-len" in message
    assert open_folder(folder, max_model_len=4096).max_model_len == 4096


def test_inputs_of_endless_steps_are_refused_with_the_flag_that_helps(folder):
    with pytest.raises(ModelFolderError, match=r"step of 200000000 .* --max-num-batched-tokens"):
        open_folder(folder, max_num_batched_tokens=200_000_000)


def test_a_million_tokens_for_256_requests_are_served(folder):
    edit(folder / "config.json", max_position_embeddings=2**20)
    assert open_folder(folder).max_model_len == 2**20


@pytest.mark.parametrize("token_id", [VOCAB_SIZE + MAX_TOKENS_BEYOND, 2**31, 2**64, -1, "7", None])
def test_a_token_id_beyond_the_model_is_refused(folder, token_id):
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"].append({"id": token_id, "content": "<far>", "special": True})
    path.write_text(json.dumps(content))
    assert f"ids are below {VOCAB_SIZE + MAX_TOKENS_BEYOND}" in refusal(folder)
    del content["added_tokens"][-1]
    content["model"]["vocab"]["far"] = token_id
    path.write_text(json.dumps(content))
    assert f"ids are below {VOCAB_SIZE + MAX_TOKENS_BEYOND}" in refusal(folder)


@pytest.mark.parametrize("content", [b"", b"[", b"[]", b"[" * 10**5, b"\xff"])
def test_a_tokenizer_that_is_no_json_object_is_refused(folder, content):
    (folder / "tokenizer.json").write_bytes(content)
    assert "tokenizer.json" in refusal(folder)


@pytest.mark.parametrize("name", TOKENIZER_FILE_BYTES)
def test_a_file_of_the_tokenizer_beyond_its_limit_is_refused_unread(folder, name):
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.touch()
    os.truncate(path, TOKENIZER_FILE_BYTES[name] + 1)
    assert f"{name} cannot be read: it is over the limit" in refusal(folder)


@pytest.mark.parametrize("name", [*TOKENIZER_FILE_BYTES, "generation_config.json"])
def test_a_pipe_is_refused_without_waiting(folder, name):
    (folder / name).unlink(missing_ok=True)
    (folder / name).parent.mkdir(exist_ok=True)
    os.mkfifo(folder / name)
    if name == "generation_config.json":
        assert open_folder(folder).default_sampling.temperature == 1.0
    else:
        assert "is not a regular file" in refusal(folder)


@pytest.mark.parametrize("name", TOKENIZER_FILE_BYTES)
def test_a_link_out_of_the_folder_is_refused(folder, tmp_path, name):
    secret = tmp_path / "secret"
    secret.write_text("{}")
    (folder / name).unlink(missing_ok=True)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).symlink_to(secret)
    assert f"{name} leads out of the folder, to {secret}" in refusal(folder)


def test_links_inside_of_the_folder_and_of_a_cache_are_followed(folder, tmp_path):
    (folder / "tokenizer.json").rename(folder / "own.json")
    (folder / "tokenizer.json").symlink_to("own.json")
    assert open_folder(folder).tokenizer.content("tokenizer.json")
    cache = tmp_path / "models--octavo--tiny"
    snapshot, blobs = cache / "snapshots" / "4f1", cache / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(Path(TINY_CHECKPOINT).iterdir())):
        shutil.copyfile(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert open_folder(snapshot).tokenizer.sha256
