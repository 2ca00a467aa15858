"""Packed weights stay so where products take them, with the values that they have."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.layers.experts import Experts
from models.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from models.layers.quantization import Packing, QuantizableLinear, fits_packed
from models.loading.checkpoint import CheckpointError
from models.loading.loader import load_model
from models.loading.parameter_count import count_parameters
from models.loading.stored_formats import ALL_KINDS, kept_kinds
from models.operands.packed_weights import num_columns, packed_values
from models.parallel.group import SINGLE, ParallelGroup
from models.quantization.config import QuantizationConfig, WeightScheme
from scripts.quantize_tiny import FORMATS, WEIGHTS, Format, compressed, write_quantized
from scripts.quantizers import gptq, packed
from tests.support.gpu_facts import use_gpu
from tests.support.paged_runner import PagedRunner
from tests.support.quantized_checkpoints import WIDE
from tests.support.random_checkpoints import write_checkpoint

CPU = torch.device("cpu")
SCALE_ERROR = 2**-8
"""Scales of integers are kept in bfloat16."""
GPTQ_8 = {
    "quant_method": "gptq", "bits": 8, "group_size": 32, "sym": False, "desc_act": True,
}  # fmt: skip
INT8_64 = {
    "num_bits": 8, "type": "int", "symmetric": False, "strategy": "group", "group_size": 64,
}  # fmt: skip
FORMS = FORMATS | {
    "gptq-8-bit-order": Format(gptq(32, bits=8, symmetric=False, ordered=True), GPTQ_8),
    "compressed-int8-zeros": Format(
        packed(64, bits=8, symmetric=False), compressed("pack-quantized", INT8_64)
    ),
}
PACKED = {
    "modelopt-nvfp4": "nvfp4",
    "compressed-nvfp4": "nvfp4",
    "compressed-mxfp4": "mxfp4",
    "quark-mxfp4": "mxfp4",
    "quark-int4": "int4 groups of 32",
    "quark-uint4-order": "int4 groups of 32, zero points",
    "awq": "int4 groups of 64, zero points",
    "awq-no-zeros": "int4 groups of 32",
    "gptq": "int4 groups of 64",
    "gptq-zeros": "int4 groups of 32, zero points",
    "gptq-act-order": "int4 groups of 64, zero points, ordered",
    "gptq-v2": "int4 groups of 64, zero points",
    "gptq-channel": "int4 rows",
    "compressed-int4-32": "int4 groups of 32",
    "compressed-int4-zeros": "int4 groups of 64, zero points",
    "compressed-int4-order": "int4 groups of 64, ordered",
    "compressed-int4-channel": "int4 rows",
    "gptq-8-bit": "int8 groups of 64",
    "gptq-8-bit-order": "int8 groups of 32, zero points, ordered",
    "compressed-int8": "int8 rows",
    "compressed-int8-packed": "int8 rows",
    "compressed-int8-zeros": "int8 groups of 64, zero points",
}
"""Format -> how its projections are kept."""
SHAPES = {
    "deepseek_v3": WIDE
    | {"num_key_value_heads": 4, "q_lora_rank": 128, "kv_lora_rank": 64, "qk_nope_head_dim": 64,
       "qk_rope_head_dim": 64, "v_head_dim": 64, "moe_intermediate_size": 128,
       "num_hidden_layers": 2},
}  # fmt: skip
each_form = pytest.mark.parametrize("form", PACKED)
GROUPS = [ParallelGroup(rank=rank, size=2) for rank in range(2)]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Returns a function from a family to a random checkpoint of it."""
    folders = {}

    def source(variant):
        if variant not in folders:
            folders[variant] = tmp_path_factory.mktemp(variant)
            write_checkpoint(folders[variant], variant, **SHAPES.get(variant, WIDE))
        return folders[variant]

    return source


@pytest.fixture
def stored(source, tmp_path):
    """Returns a function that writes a format of a family; returns its folder."""

    def stored(form, variant="llama"):
        write_quantized(source(variant), tmp_path, FORMS[form])
        return tmp_path

    return stored


def load(folder, **options):
    return load_model(folder, device=CPU, dtype=torch.float32, **options)


def packed_layers(model):
    return {
        path: layer
        for path, layer in model.named_modules()
        if isinstance(layer, QuantizableLinear) and layer.method.packing is not None
    }


def values_of(layer):
    """Returns what a packed layer multiplies, its columns in order of the inputs."""
    values = packed_values(layer.weight, layer.weight_scale, layer.weight_zero, torch.float32)
    if layer.weight_order is None:
        return values
    return torch.empty_like(values).index_copy_(1, layer.weight_order.long(), values)


def logits(model):
    runner = PagedRunner(model)
    return runner.run(runner.add([5, 96, 0, 48, 49, 17, 33, 80, 2, 61]), chunk_size=4)


def assert_same_values(kept, plain):
    layers = packed_layers(kept)
    for path, layer in layers.items():
        expected = plain.get_submodule(path).weight
        torch.testing.assert_close(
            values_of(layer), expected, rtol=SCALE_ERROR, atol=1e-7, msg=path
        )
    # tests/unit/models/loading/test_packed_experts.py has the experts that stay packed.
    packed = {*layers, *(path for path, each in kept.named_modules() if isinstance(each, Experts))}
    for name, param in plain.named_parameters():
        if name.rpartition(".")[0] not in packed or name.endswith("bias"):
            assert torch.equal(kept.get_parameter(name), param), name
    return layers


@pytest.mark.parametrize("form", FORMS)
def test_a_matrix_of_eight_rows_has_the_stored_values(form, tmp_path):
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 8}
    write_checkpoint(tmp_path, "llama", **WIDE | sizes)
    plain = write_quantized(tmp_path, tmp_path / "stored", FORMS[form])
    loaded = load(tmp_path / "stored").get_parameter("model.layers.0.self_attn.qkv_proj.weight")
    for name, values in zip("qkv", loaded.split((64, 8, 8)), strict=True):
        expected = plain[f"model.layers.0.self_attn.{name}_proj.weight"]
        torch.testing.assert_close(values, expected, rtol=1e-6, atol=1e-7)


@each_form
def test_kept_weights_have_the_dequantised_values(stored, form):
    folder = stored(form)
    kept, plain = (load(folder, keep_quantized=each) for each in (True, False))
    layers = assert_same_values(kept, plain)
    assert len(layers) == 4 * len(kept.model.layers)
    assert PACKED[form] in {each.kept for each in kept.weight_formats}
    assert sum(each.bytes for each in kept.weight_formats) == sum(
        param.nbytes for param in kept.parameters()
    )
    assert count_parameters(kept) == count_parameters(plain)


@each_form
def test_products_are_those_of_the_dequantised_weights(stored, form):
    folder = stored(form)
    kept, plain = (load(folder, keep_quantized=each) for each in (True, False))
    for path, layer in packed_layers(kept).items():
        x = torch.randn(5, num_columns(layer.weight))
        expected = plain.get_submodule(path)(x)
        assert (layer(x) - expected).norm() <= 2 * SCALE_ERROR * expected.norm()
    expected = logits(plain)
    assert (logits(kept) - expected).norm() <= 0.05 * expected.norm()


@each_form
def test_ranks_keep_their_shares(stored, form):
    folder = stored(form)
    for group in GROUPS:
        kept, plain = (load(folder, group=group, keep_quantized=each) for each in (True, False))
        layers = assert_same_values(kept, plain)
        assert layers
        # A rank's inputs are not those of its columns after these are sorted.
        is_ordered = PACKED[form].endswith("ordered")
        assert is_ordered == ("model.layers.0.mlp.down_proj" not in layers)


@pytest.mark.parametrize("form", ["awq", "modelopt-nvfp4", "gptq-channel", "compressed-int8"])
@pytest.mark.parametrize("variant", ["llama_bias", "qwen3", "deepseek_v3"])
def test_families_keep_them(stored, form, variant):
    folder = stored(form, variant)
    kept, plain = (load(folder, keep_quantized=each) for each in (True, False))
    assert assert_same_values(kept, plain)


def add_zero_points(folder, value):
    """Adds a zero point for each scale of compressed-int8."""
    tensors = load_file(folder / WEIGHTS)
    for name in [name for name in tensors if name.endswith("_proj.weight_scale")]:
        zeros = torch.full_like(tensors[name], value, dtype=torch.int8)
        tensors[name.replace("weight_scale", "weight_zero_point")] = zeros
    save_file(tensors, folder / WEIGHTS)


def load_called(folder, *, symmetric):
    """Loads weights that the configuration calls symmetric or not."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["symmetric"] = symmetric
    (folder / "config.json").write_text(json.dumps(config))
    return load(folder, keep_quantized=True)


@pytest.mark.parametrize("form", ["compressed-int4-zeros", "compressed-int8"])
def test_zero_points_count_although_weights_are_called_symmetric(stored, form):
    folder = stored(form)
    if form == "compressed-int8":
        add_zero_points(folder, 3)
    called, described = (load_called(folder, symmetric=each) for each in (True, False))
    for path, layer in packed_layers(described).items():
        assert torch.equal(values_of(called.get_submodule(path)), values_of(layer)), path


def test_neutral_zero_points_of_symmetric_weights_are_left_out(stored):
    folder = stored("compressed-int8")
    add_zero_points(folder, 0)
    layers = packed_layers(load_called(folder, symmetric=True))
    assert layers
    assert all(layer.weight_zero is None for layer in layers.values())


def test_columns_in_several_orders_are_dequantised(stored):
    folder = stored("gptq-act-order")
    tensors = load_file(folder / WEIGHTS)
    name = "model.layers.1.self_attn.k_proj.g_idx"
    tensors[name] = tensors[name].flip(0).contiguous()
    tensors["model.layers.1.mlp.down_proj.g_idx"].fill_(0)
    save_file(tensors, folder / WEIGHTS)
    kept, plain = (load(folder, keep_quantized=each) for each in (True, False))
    layers = assert_same_values(kept, plain)
    assert "model.layers.1.self_attn.qkv_proj" not in layers
    assert "model.layers.1.self_attn.o_proj" in layers
    # Groups of unequal size have no order in which they are runs.
    assert "model.layers.1.mlp.down_proj" not in layers


def test_projections_of_several_formats_in_one_layer_are_dequantised(source, tmp_path):
    write_quantized(source("llama"), tmp_path, FORMATS["gptq"])
    module = "model.layers.0.mlp.gate_proj."
    stored = load_file(tmp_path / WEIGHTS)
    tensors = {name: each for name, each in stored.items() if not name.startswith(module)}
    tensors[f"{module}weight"] = load_file(source("llama") / WEIGHTS)[f"{module}weight"]
    save_file(tensors, tmp_path / WEIGHTS)
    layers = packed_layers(load(tmp_path, keep_quantized=True))
    assert "model.layers.0.mlp.gate_up_proj" not in layers
    assert "model.layers.0.mlp.down_proj" in layers


@pytest.mark.parametrize(
    ("form", "part", "value"),
    [("quark-mxfp4", "weight_scale", 255), ("awq", "scales", float("nan"))],
)
def test_a_scale_that_is_not_a_number_is_an_error(stored, form, part, value):
    folder = stored(form)
    tensors = load_file(folder / WEIGHTS)
    tensors[f"model.layers.0.mlp.down_proj.{part}"][0, 0] = value
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"down_proj.*holds NaN"):
        load(folder, keep_quantized=True)


@each_form
def test_dummy_weights_are_kept_alike(stored, form):
    folder = stored(form)
    model, again = (load(folder, keep_quantized=True, load_format="dummy") for _ in range(2))
    assert len(packed_layers(model)) >= 3 * len(model.model.layers)
    outcome = logits(model)
    assert outcome.isfinite().all()
    assert torch.equal(outcome, logits(again))


@pytest.mark.parametrize(
    ("columns", "packing", "fits"),
    [
        (256, Packing(kind="int4", group=128), True),
        (256, Packing(kind="int4", group=None), True),
        (256, Packing(kind="int4", group=16), False),
        (256, Packing(kind="int8", group=None), True),
        (256, Packing(kind="int8", group=16), False),
        (48, Packing(kind="int8", group=None), False),
        (192, Packing(kind="int4", group=128), False),
        (48, Packing(kind="nvfp4", group=16), False),
        (96, Packing(kind="nvfp4", group=16), True),
        (96, Packing(kind="mxfp4", group=32), True),
    ],
)
def test_shapes_that_products_take(columns, packing, fits):
    layer = MergedColumnParallelLinear(columns, [40], bias=False, group=SINGLE)
    assert fits_packed(layer, packing) == fits
    shared = RowParallelLinear(2 * columns, 40, bias=False, group=GROUPS[1])
    assert fits_packed(shared, packing) == fits
    ordered = Packing(kind="int4", group=32, has_order=True)
    assert not fits_packed(shared, ordered)


def test_a_cpu_keeps_nothing_by_itself(stored):
    model = load(stored("awq"))
    assert not packed_layers(model)
    quantization = QuantizationConfig(method="awq", schemes=(WeightScheme(kind="int4"),))
    assert not kept_kinds(CPU, torch.bfloat16, quantization)


def test_hopper_keeps_packed_weights_for_bfloat16_only(monkeypatch):
    use_gpu(monkeypatch)
    quantization = QuantizationConfig(method="awq", schemes=(WeightScheme(kind="int4"),))
    device = torch.device("cuda")
    assert kept_kinds(device, torch.bfloat16, quantization) == ALL_KINDS
    assert kept_kinds(device, torch.float16, quantization) == {"fp8"}
    use_gpu(monkeypatch, (10, 0))
    assert kept_kinds(device, torch.bfloat16, quantization) == {"fp8"}
