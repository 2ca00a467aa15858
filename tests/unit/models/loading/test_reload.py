"""Weights that are loaded again into a model that has some."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.loading.checkpoint import SINGLE_FILE, CheckpointError
from models.loading.loader import load_model
from models.loading.plan import MissingTensorsError
from models.loading.reload import check_loads, plan_reload, reload_weights
from models.parallel.group import ParallelGroup
from scripts.quantize_tiny import FORMATS, write_quantized
from tests.support.quantized_checkpoints import quantize_checkpoint

CPU, DTYPE = torch.device("cpu"), torch.float32
VARIANTS = (
    "llama_tied", "llama_bias", "qwen3", "phi3_partial_rotary", "qwen3_moe", "mixtral", "gpt_oss",
    "deepseek_v3", "qwen3_next", "gemma3",
)  # fmt: skip
QUERY = "model.layers.1.self_attn.q_proj.weight"


def load(folder, **options):
    return load_model(folder, device=CPU, dtype=DTYPE, **options)


def turned(folder, target):
    """Writes a checkpoint of the same form: every tensor begins with its last row."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    tensors = load_file(folder / SINGLE_FILE)
    other = {n: t.flip(0).contiguous() if t.dim() else t for n, t in tensors.items()}
    save_file(other, target / SINGLE_FILE)
    return target


def apply(model, folder, *, is_part=False, is_shared=False):
    loads = plan_reload(model, folder, device=CPU, dtype=DTYPE, is_part=is_part)
    before = bytes_of(model)
    check_loads(loads)
    assert bytes_of(model) == before
    reload_weights(loads, device=CPU, dtype=DTYPE, is_shared=is_shared)


def bytes_of(model):
    return {
        name: param.view(torch.uint8).numpy().tobytes() for name, param in model.named_parameters()
    }


def assert_reloads(first, second, tmp_path, **options):
    """Both at once and tensor by tensor, the model becomes that of the second checkpoint."""
    expected = bytes_of(load(second, **options))
    model = load(first, **options)
    addresses = [param.data_ptr() for param in model.parameters()]
    assert bytes_of(model) != expected
    group = options.get("group")
    is_shared = group is not None and group.size > 1
    apply(model, second, is_shared=is_shared)
    assert bytes_of(model) == expected
    assert [param.data_ptr() for param in model.parameters()] == addresses

    part = tmp_path / "part"
    part.mkdir(exist_ok=True)
    model = load(first, **options)
    tensors = load_file(second / SINGLE_FILE)
    modules = {}
    for name in tensors:
        modules.setdefault(name.rpartition(".")[0].removesuffix(".weight"), []).append(name)
    for names in modules.values():
        save_file({name: tensors[name] for name in names}, part / SINGLE_FILE)
        apply(model, part, is_part=True, is_shared=is_shared)
    assert bytes_of(model) == expected


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_becomes_that_of_the_other_checkpoint(variant, checkpoint, tmp_path):
    folder = checkpoint(variant)[0]
    assert_reloads(folder, turned(folder, tmp_path / "second"), tmp_path)


@pytest.mark.parametrize("variant", ["llama_tied", "qwen3_moe"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_takes_its_share(variant, rank, checkpoint, tmp_path):
    folder = checkpoint(variant)[0]
    group = ParallelGroup(rank=rank, size=2)
    assert_reloads(folder, turned(folder, tmp_path / "second"), tmp_path, group=group)


@pytest.mark.parametrize("variant", ["llama", "qwen3_moe"])
def test_plain_weights_are_rounded_to_fp8_again(variant, wide_source, tmp_path):
    folder = wide_source(variant)
    second = turned(folder, tmp_path / "second")
    assert_reloads(folder, second, tmp_path, rounds_to_fp8=True, keep_quantized=True)


@pytest.mark.parametrize("form", ["awq", "compressed-int8", "modelopt-nvfp4"])
def test_packed_weights_stay_packed(form, wide_source, tmp_path):
    write_quantized(wide_source("llama"), tmp_path / "first", FORMATS[form])
    second = turned(tmp_path / "first", tmp_path / "second")
    assert_reloads(tmp_path / "first", second, tmp_path, keep_quantized=True)


def test_stored_fp8_weights_come_with_their_scales(wide_source, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    shutil.copytree(wide_source("llama"), first, dirs_exist_ok=True)
    quantize_checkpoint(wide_source("llama"), first, "deepseek")
    turned(first, second)
    model = load(first, keep_quantized=True)
    tensors = load_file(second / SINGLE_FILE)
    for name in (QUERY, f"{QUERY}_scale_inv"):
        save_file({name: tensors[name]}, second / SINGLE_FILE)
        with pytest.raises(CheckpointError, match=r"missing|no weight that it scales"):
            plan_reload(model, second, device=CPU, dtype=DTYPE, is_part=True)
    plain = {QUERY: torch.zeros(256, 256), f"{QUERY}_scale_inv": tensors[f"{QUERY}_scale_inv"]}
    save_file(plain, second / SINGLE_FILE)
    with pytest.raises(CheckpointError, match="keeps this weight as float8_e4m3fn"):
        plan_reload(model, second, device=CPU, dtype=DTYPE, is_part=True)


BAD = {
    "shape": (lambda t: t[:-1].clone(), "its shape is"),
    "nan": (lambda t: t.index_fill(0, torch.tensor([3]), torch.nan), "holds NaN"),
    "infinity": (lambda t: t.index_fill(0, torch.tensor([3]), torch.inf), "holds NaN"),
    "range": (lambda t: t.double() * 1e300, "beyond the range"),
    "dtype": (lambda t: t.to(torch.int32), "its dtype is int32"),
}


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_tensor_is_found_before_anything_changes(fault, checkpoint, tmp_path):
    folder = checkpoint("llama")[0]
    spoil, message = BAD[fault]
    second = turned(folder, tmp_path / "second")
    tensors = load_file(second / SINGLE_FILE)
    save_file(tensors | {QUERY: spoil(tensors[QUERY])}, second / SINGLE_FILE)
    model = load(folder)
    before = bytes_of(model)
    with pytest.raises(CheckpointError, match=f"tensor {QUERY}.*{message}"):
        check_loads(plan_reload(model, second, device=CPU, dtype=DTYPE))
    assert bytes_of(model) == before


def test_missing_and_unknown_tensors_are_named(checkpoint, tmp_path):
    folder = checkpoint("llama")[0]
    model = load(folder)
    save_file({QUERY: torch.zeros(32, 32)}, tmp_path / SINGLE_FILE)
    with pytest.raises(MissingTensorsError, match="tensors are missing"):
        plan_reload(model, tmp_path, device=CPU, dtype=DTYPE)
    save_file({"model.other.weight": torch.zeros(32, 32)}, tmp_path / SINGLE_FILE)
    with pytest.raises(CheckpointError, match=r"no tensor model\.other\.weight"):
        plan_reload(model, tmp_path, device=CPU, dtype=DTYPE, is_part=True)
