"""Experts stored in 4 bits, one at a time: kept so, shared out, or dequantised."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.layers.experts import Experts
from models.loading.checkpoint import CheckpointError
from models.loading.loader import load_model
from models.loading.parameter_count import count_parameters
from models.ops.experts.expert_formats import expert_values
from models.parallel.group import ParallelGroup
from scripts.quantize_tiny import FORMATS, WEIGHTS, Format, compressed, write_quantized
from scripts.quantizers import awq, gptq, packed
from tests.support.adapters import load_with_adapters, random_factors, write_adapter
from tests.support.paged_runner import PagedRunner
from tests.support.quantized_checkpoints import WIDE

SCALE_ERROR = 2**-8
"""Scales of integers and of NVFP4 are kept in bfloat16."""
AWQ_128 = {"quant_method": "awq", "bits": 4, "zero_point": True, "group_size": 128}
INT4_256 = {
    "num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 256,
}  # fmt: skip
FORMS = FORMATS | {
    "awq-128": Format(awq(128), AWQ_128),
    "compressed-int4-256": Format(
        packed(256, symmetric=False), compressed("pack-quantized", INT4_256)
    ),
}
KEPT = {
    "awq": ("int4 groups of 64, zero points", 64),
    "awq-128": ("int4 groups of 128, zero points", 128),
    "awq-no-zeros": ("int4 groups of 32", 32),
    "gptq": ("int4 groups of 64", 64),
    "gptq-zeros": ("int4 groups of 32, zero points", 32),
    "gptq-v2": ("int4 groups of 64, zero points", 64),
    "gptq-channel": ("int4 rows", 128),
    "compressed-int4-32": ("int4 groups of 32", 32),
    "compressed-int4-zeros": ("int4 groups of 64, zero points", 64),
    "compressed-int4-256": ("int4 groups of 256, zero points", 128),
    "compressed-int4-channel": ("int4 rows", 128),
    "compressed-mxfp4": ("mxfp4", 32),
    "quark-mxfp4": ("mxfp4", 32),
    "compressed-nvfp4": ("nvfp4", 16),
    "modelopt-nvfp4": ("nvfp4", 16),
}
"""Format -> how experts are kept, and columns that share a scale."""
DEQUANTISED = ("gptq-act-order", "compressed-int4-order", "gptq-8-bit", "compressed-int8")
TOKEN_IDS = [5, 96, 0, 48, 49, 17, 33, 80, 2, 61]
each_form = pytest.mark.parametrize("form", KEPT)


@pytest.fixture
def stored(wide_source, tmp_path):
    """Returns a function that writes a format of a family; returns its folder."""

    def stored(form, variant="qwen3_moe", **sizes):
        write_quantized(wide_source(variant, **sizes), tmp_path, FORMS[form])
        return tmp_path

    return stored


def load(folder, **options):
    return load_model(folder, device=torch.device("cpu"), dtype=torch.float32, **options)


def load_both(folder, **options):
    """Returns the model with kept weights, and the dequantised one."""
    return [load(folder, keep_quantized=is_kept, **options) for is_kept in (True, False)]


def experts_of(model):
    return [layer for layer in model.modules() if isinstance(layer, Experts)]


def values(experts):
    """Returns all experts' matrices, multiplied out."""
    return [
        expert_values(weight[expert], scale[expert], torch.float32, num_parts=num_parts)
        for weight, scale, num_parts in (
            (experts.gate_up_proj, experts.gate_up_proj_scale, 2),
            (experts.down_proj, experts.down_proj_scale, 1),
        )
        for expert in range(len(weight))
    ]


def assert_same_values(kept, plain):
    for own, other in zip(experts_of(kept), experts_of(plain), strict=True):
        expected = [*other.gate_up_proj, *other.down_proj]
        for actual, matrix in zip(values(own), expected, strict=True):
            torch.testing.assert_close(actual, matrix, rtol=SCALE_ERROR, atol=1e-7)


def logits(model):
    runner = PagedRunner(model)
    return runner.run(runner.add(TOKEN_IDS), chunk_size=4)


@each_form
def test_kept_experts_have_the_dequantised_values(stored, form):
    kept, plain = load_both(stored(form))
    assert_same_values(kept, plain)
    words, columns = KEPT[form]
    assert all(each.columns_per_scale == columns for each in experts_of(kept))
    assert words in {each.kept for each in kept.weight_formats}
    assert sum(each.bytes for each in kept.weight_formats) == sum(
        param.nbytes for param in kept.parameters()
    )
    assert count_parameters(kept) == count_parameters(plain)


@each_form
def test_layers_compute_what_those_of_dequantised_weights_do(stored, form):
    kept, plain = load_both(stored(form))
    x = torch.randn(7, WIDE["hidden_size"])
    for own, other in zip(kept.model.layers, plain.model.layers, strict=True):
        expected = other.mlp(x)
        assert (own.mlp(x) - expected).norm() <= 2 * SCALE_ERROR * expected.norm()


@pytest.mark.parametrize(
    "form", ["awq-128", "gptq", "compressed-int4-32", "quark-mxfp4", "modelopt-nvfp4"]
)
@pytest.mark.parametrize("variant", ["mixtral", "deepseek_v3"])
def test_other_families_keep_them(stored, form, variant):
    kept, plain = load_both(stored(form, variant))
    assert_same_values(kept, plain)
    expected = logits(plain)
    errors = (logits(kept) - expected).norm(dim=-1).sort().values
    # Experts may be so close for one token that it chooses others.
    assert errors[:-1].norm() <= 0.05 * expected.norm()


@pytest.mark.parametrize("num_ranks", [2, 4])
@each_form
def test_ranks_keep_their_shares(stored, form, num_ranks):
    folder = stored(form)
    for rank in range(num_ranks):
        kept, plain = load_both(folder, group=ParallelGroup(rank=rank, size=num_ranks))
        assert_same_values(kept, plain)
        # A share of 256 columns may be less than a group, whose words then are of fewer columns.
        columns = min(KEPT[form][1], 256 // num_ranks)
        assert all(each.columns_per_scale == columns for each in experts_of(kept))


def test_shares_that_end_within_a_run_are_dequantised(stored):
    folder = stored("awq-no-zeros", moe_intermediate_size=160)
    group = ParallelGroup(rank=1, size=2)
    model = load(folder, keep_quantized=True, group=group)
    assert all(each.down_proj.dtype == torch.float32 for each in experts_of(model))
    assert_same_values(*load_both(folder))


@pytest.mark.parametrize("form", DEQUANTISED)
def test_columns_in_an_order_and_other_formats_are_dequantised(stored, form):
    kept, plain = load_both(stored(form))
    for own, other in zip(experts_of(kept), experts_of(plain), strict=True):
        assert torch.equal(own.down_proj, other.down_proj)
        assert own.down_proj_scale is None


def test_an_order_of_equal_runs_is_none(stored):
    folder = stored("gptq")
    assert "model.layers.0.mlp.experts.0.up_proj.g_idx" in load_file(folder / WEIGHTS)
    assert all(each.packing is not None for each in experts_of(load(folder, keep_quantized=True)))


def test_one_expert_that_is_not_packed_makes_all_of_a_layer_plain(wide_source, stored):
    folder = stored("awq")
    module = "model.layers.1.mlp.experts.3.up_proj."
    tensors = {
        name: each
        for name, each in load_file(folder / WEIGHTS).items()
        if not name.startswith(module)
    }
    tensors[f"{module}weight"] = load_file(wide_source("qwen3_moe") / WEIGHTS)[f"{module}weight"]
    save_file(tensors, folder / WEIGHTS)
    first, second = experts_of(load(folder, keep_quantized=True))
    assert first.down_proj.dtype == torch.uint8
    assert second.down_proj.dtype == torch.float32


def test_groups_of_two_sizes_in_a_layer_are_dequantised(wide_source, tmp_path):
    form = Format(
        gptq(64),
        FORMATS["gptq"].config | {"dynamic": {r"+:.*mlp\.experts.*down_proj": {"group_size": 32}}},
        others={"down_proj": gptq(32)},
    )
    write_quantized(wide_source("qwen3_moe"), tmp_path, form)
    kept, plain = load_both(tmp_path)
    for own, other in zip(experts_of(kept), experts_of(plain), strict=True):
        assert torch.equal(own.down_proj, other.down_proj)


@pytest.mark.parametrize(
    ("form", "part", "value", "words"),
    [
        ("awq", "scales", float("inf"), "NaN or infinity$"),
        ("quark-mxfp4", "weight_scale", 191, r"NaN or infinity, or a scale of 2\^64 or more$"),
        ("compressed-nvfp4", "weight_global_scale", 1e-18, r".*scale of 2\^64 or more$"),
        ("modelopt-nvfp4", "weight_scale_2", 1e18, r".*scale of 2\^64 or more$"),
    ],
)
def test_a_scale_that_products_do_not_take_is_an_error(stored, form, part, value, words):
    folder = stored(form)
    tensors = load_file(folder / WEIGHTS)
    tensors[f"model.layers.0.mlp.experts.2.down_proj.{part}"].view(-1)[0] = value
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(CheckpointError, match=rf"experts\.2\.down_proj.*holds {words}"):
        load(folder, keep_quantized=True)


@each_form
def test_made_up_experts_are_kept_alike_and_sane(stored, form):
    folder = stored(form)
    model, again = (load(folder, keep_quantized=True, load_format="dummy") for _ in range(2))
    assert {each.packing.describe() for each in experts_of(model)} == {KEPT[form][0]}
    for matrix in values(experts_of(model)[0]):
        # Scales of MXFP4 are powers of two.
        tolerance = 0.42 if KEPT[form][0] == "mxfp4" else 0.05
        assert matrix.std() == pytest.approx(matrix.shape[1] ** -0.5, rel=tolerance)
        # All tokens would come to choose the same experts.
        assert matrix.mean().abs() < matrix.std() / 20
    outcome = logits(model)
    assert outcome.isfinite().all()
    assert torch.equal(outcome, logits(again))


def test_made_up_experts_that_the_config_ignores_are_plain(stored):
    folder = stored("awq")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["model.layers.0"]
    (folder / "config.json").write_text(json.dumps(config))
    model = load(folder, keep_quantized=True, load_format="dummy")
    dtypes = [each.down_proj.dtype for each in experts_of(model)]
    assert dtypes == [torch.float32, torch.uint8]


def test_a_cpu_keeps_none_by_itself(stored):
    assert all(each.packing is None for each in experts_of(load(stored("awq"))))


@pytest.mark.parametrize("form", ["compressed-mxfp4", "modelopt-nvfp4", "gptq-zeros", "awq-128"])
def test_adapters_of_kept_experts_equal_merged_dequantised_weights(stored, form, tmp_path):
    folder = stored(form)
    merged = load(folder, keep_quantized=True)
    factors = {}
    for number, experts in enumerate(experts_of(merged)):
        matrices, count = torch.stack(values(experts)[: experts.num_experts]), experts.num_experts
        downs = torch.stack(values(experts)[count:])
        for name, plain in (("gate_up_proj", matrices), ("down_proj", downs)):
            path = f"model.layers.{number}.mlp.experts.{name}"
            drawn = random_factors(
                {path: plain.shape[1:]}, rank=4 * count, seed=len(factors), size=0.1
            )
            a, b = drawn[path]
            by_expert = b.view(len(b), -1, count).permute(2, 0, 1)
            plain += 2 * (by_expert @ a.view(count, -1, a.shape[1]))
            setattr(experts, name, torch.nn.Parameter(plain, requires_grad=False))
            setattr(experts, f"{name}_scale", None)
            factors |= drawn
    adapter = write_adapter(tmp_path / "adapter", factors)
    model = load_with_adapters(folder, adapter, with_experts=True, keep_quantized=True)
    assert all(each.down_proj.dtype == torch.uint8 for each in experts_of(model))
    runner = PagedRunner(model)
    adapted, plain = runner.run(runner.add(TOKEN_IDS, 1), 4), runner.run(runner.add(TOKEN_IDS), 4)
    torch.testing.assert_close(adapted, logits(merged), rtol=1e-3, atol=1e-3)
    assert (adapted - plain).abs().max() > 0.1
