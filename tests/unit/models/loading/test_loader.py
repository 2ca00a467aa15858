import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.config import ConfigError
from models.loading.checkpoint import INDEX_FILE, SINGLE_FILE, CheckpointError, open_checkpoint
from models.loading.fit import check_room
from models.loading.loader import load_model
from models.parallel.group import ParallelGroup, PipelineStage
from tests.support.damaged_checkpoints import SHARDS, copy_checkpoint, split_in_two
from tests.support.paged_runner import PagedRunner
from tests.support.random_checkpoints import write_checkpoint

CPU = torch.device("cpu")
QUERY = "model.layers.1.self_attn.q_proj.weight"


def load(folder, **options):
    return load_model(folder, device=CPU, dtype=torch.float32, **options)


@pytest.fixture
def folder(checkpoint, tmp_path):
    """A copy of a checkpoint that the test may spoil."""
    return copy_checkpoint(checkpoint("llama")[0], tmp_path)


def rewrite(folder, edit):
    tensors = load_file(folder / SINGLE_FILE)
    edit(tensors)
    save_file(tensors, folder / SINGLE_FILE)


def assert_same_weights(model, other):
    others = dict(other.named_parameters())
    for name, param in model.named_parameters():
        assert torch.equal(param, others[name]), name


def test_packed_weights_hold_their_parts_in_order(folder):
    tensors = load_file(folder / SINGLE_FILE)
    layer = load(folder).model.layers[1]
    prefix = "model.layers.1."
    parts = [tensors[f"{prefix}self_attn.{n}_proj.weight"] for n in "qkv"]
    assert torch.equal(layer.self_attn.qkv_proj.weight, torch.cat(parts))
    parts = [tensors[f"{prefix}mlp.{n}_proj.weight"] for n in ("gate", "up")]
    assert torch.equal(layer.mlp.gate_up_proj.weight, torch.cat(parts))


def test_model_is_in_eval_mode_without_gradients(folder):
    model = load(folder)
    assert not model.training
    assert not any(param.requires_grad for param in model.parameters())


def test_default_dtype_is_left_as_it_was(folder):
    model = load_model(folder, device=CPU, dtype=torch.bfloat16)
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert torch.get_default_dtype() == torch.float32


def test_tied_head_shares_the_embedding(checkpoint):
    model = load(checkpoint("llama_tied")[0])
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_stored_copy_of_a_tied_head_and_rotary_buffers_are_passed_over(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    embedding = load_file(folder / SINGLE_FILE)["model.embed_tokens.weight"]
    copies = {buffer: torch.ones(4), "lm_head.weight": embedding.clone()}
    rewrite(folder, lambda tensors: tensors.update(copies))
    model = load(folder)
    assert torch.equal(model.lm_head.weight, embedding)


def test_files_with_an_index_give_the_same_model(folder):
    whole = load(folder)
    split_in_two(folder)
    assert_same_weights(load(folder), whole)


def test_tensor_in_two_files_is_taken_from_the_one_the_index_names(folder):
    whole = load(folder)
    split_in_two(folder)
    weight_map = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
    (stale,) = set(SHARDS) - {weight_map[QUERY]}
    tensors = load_file(folder / stale)
    save_file({**tensors, QUERY: torch.zeros(32, 32)}, folder / stale)
    assert_same_weights(load(folder), whole)
    assert [tensor.name for tensor in open_checkpoint(folder)].count(QUERY) == 1


def test_progress_ends_with_all_tensors(folder):
    lines = []
    load(folder, on_progress=lines.append)
    total = len(load_file(folder / SINGLE_FILE))
    assert lines[-1].startswith(f"loaded {total} of {total} tensors")


def test_dummy_weights_need_no_file_repeat_and_stay_finite(folder):
    (folder / SINGLE_FILE).unlink()
    model, again = load(folder, load_format="dummy"), load(folder, load_format="dummy")
    assert_same_weights(model, again)
    runner = PagedRunner(model)
    logits = runner.run(runner.add(list(range(40))), chunk_size=40)
    assert logits.isfinite().all()
    assert 0.1 < logits.std() < 10


def test_unknown_load_format_is_refused(folder):
    with pytest.raises(ValueError, match="load_format is 'pickle'"):
        load(folder, load_format="pickle")


def test_missing_folder_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nowhere"):
        load(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="nowhere is not a folder"):
        open_checkpoint(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        ("qwen3_moe", "model.layers.1.mlp.experts.5.up_proj.weight"),
        ("mixtral", "model.layers.0.mlp.experts.3.w2.weight"),
        ("gpt_oss", "model.layers.2.mlp.experts.gate_up_proj_bias"),
        ("gpt_oss", "model.layers.1.self_attn.sinks"),
        ("glm4_moe", "model.layers.1.mlp.gate.e_score_correction_bias"),
        ("deepseek_v3", "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"),
        ("deepseek_v3", "model.layers.1.mlp.shared_experts.down_proj.weight"),
    ],
)
def test_missing_tensor_of_a_family_is_named(checkpoint, tmp_path, variant, name):
    source, _ = checkpoint(variant)
    tensors = load_file(source / SINGLE_FILE)
    stored = name.replace(".mlp.", ".block_sparse_moe.") if variant == "mixtral" else name
    del tensors[stored]
    save_file(tensors, tmp_path / SINGLE_FILE)
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=f"1 tensors are missing, the first is {name}"):
        load(tmp_path)


def test_layers_past_the_last_one_are_passed_over(checkpoint, tmp_path):
    source, _ = checkpoint("glm4_moe")
    tensors = load_file(source / SINGLE_FILE)
    tensors["model.layers.3.eh_proj.weight"] = torch.ones(2, 2)
    save_file(tensors, tmp_path / SINGLE_FILE)
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    assert_same_weights(load(tmp_path), load(source))


@pytest.mark.parametrize(
    "name",
    [
        QUERY,
        "model.layers.0.self_attn.o_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
    ],
)
def test_misshaped_tensor_is_named_with_both_shapes(folder, name):
    def shorten(tensors):
        tensors[name] = tensors[name][:-1].contiguous()

    expected = tuple(load_file(folder / SINGLE_FILE)[name].shape)
    rewrite(folder, shorten)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    message = str(caught.value)
    assert SINGLE_FILE in message
    assert name in message
    assert str(expected) in message


@pytest.mark.parametrize("variant", ["qwen3", "gpt_oss", "deepseek_v3", "mixtral"])
def test_each_rank_reads_only_its_slices(tmp_path, monkeypatch, variant):
    write_checkpoint(tmp_path, variant, tie_word_embeddings=False, vocab_size=96)
    num_read = []

    def counted(values):
        num_read.append(values.nbytes)
        return values

    monkeypatch.setattr("models.loading.weights.stay_on_the_cpu", counted)
    for rank in range(2):
        num_read.clear()
        group = ParallelGroup(rank=rank, size=2)
        model = load_model(tmp_path, device=CPU, dtype=torch.float32, group=group)
        assert sum(num_read) == sum(param.nbytes for param in model.parameters())


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("variant", ["qwen3", "gpt_oss", "deepseek_v3", "mixtral", "qwen3_next"])
def test_each_stage_reads_only_its_layers(tmp_path, monkeypatch, variant, is_tied):
    write_checkpoint(tmp_path, variant, tie_word_embeddings=is_tied, num_hidden_layers=5)
    num_read = []

    def counted(values):
        num_read.append(values.nbytes)
        return values

    monkeypatch.setattr("models.loading.weights.stay_on_the_cpu", counted)
    whole = set(dict(load_model(tmp_path, device=CPU, dtype=torch.float32).named_parameters()))
    names = []
    for rank in range(3):
        num_read.clear()
        group = ParallelGroup(stage=PipelineStage(rank=rank, size=3, num_layers=(1, 3, 1)))
        model = load_model(tmp_path, device=CPU, dtype=torch.float32, group=group)
        assert sum(num_read) == sum(param.nbytes for param in model.parameters())
        assert len(model.cache_specs()) == (1, 3, 1)[rank]
        names.append(set(dict(model.named_parameters())))
    assert set.union(*names) == whole
    shared = names[0] & names[2]
    assert shared == ({"model.embed_tokens.weight"} if is_tied else set())
    assert not names[1] & (names[0] | names[2])


def test_a_gpu_without_room_for_the_weights_is_refused(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, "qwen3")
    model = load(tmp_path)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2000))
    check_room(model, CPU)
    with pytest.raises(CheckpointError, match="GiB free"):
        check_room(model, torch.device("cuda:1"))
