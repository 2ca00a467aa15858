"""Quantised checkpoints of families with states: their values, and which weights are kept."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from models.layers.experts import Experts
from models.layers.gated_attention import GatedQKVLinear
from models.layers.quantization import FP8_BLOCKS, UNQUANTIZED, QuantizableLinear
from models.loading.loader import load_model
from models.ops.experts.expert_formats import expert_values
from models.parallel.group import SINGLE, ParallelGroup
from scripts.quantize_tiny import FORMATS, write_plain, write_quantized
from tests.support.paged_runner import PagedRunner
from tests.support.quantized_checkpoints import BLOCK, WIDE_STATES
from tests.support.random_checkpoints import VARIANTS

FORMS = ("fp8-block", "compressed-fp8-channel", "modelopt-nvfp4", "gptq-act-order", "awq")
RANKS = [SINGLE, *(ParallelGroup(rank=rank, size=2) for rank in range(2))]
TOKENS = [5, 96, 0, 48, 49, 17, 33, 80, 2, 61]

each_form = pytest.mark.parametrize("form", FORMS)
each_family = pytest.mark.parametrize("family", [name for name in WIDE_STATES if name in VARIANTS])


@pytest.fixture(scope="module")
def written(wide_source, tmp_path_factory):
    """Returns a function that writes a format; returns its folder and that of its values."""
    folders = {}

    def written(family, form):
        if (family, form) not in folders:
            folder = tmp_path_factory.mktemp(f"{family}-{form}")
            folders[family, form] = folder / "stored", folder / "plain"
            write(wide_source(family), *folders[family, form], family_form(form))
        return folders[family, form]

    return written


def write(source, stored, plain, form):
    write_plain(source, plain, write_quantized(source, stored, form))


def family_form(name):
    """Returns a format that leaves alone what its tool would."""
    others = {}
    if name in ("gptq-act-order", "awq"):
        # Rows of a few heads fill no words.
        others = dict.fromkeys((".b_proj", ".a_proj", ".g_proj"), plain)
    if "fp8" not in name:
        others["block_sparse_moe.input_linear"] = plain
        others["block_sparse_moe.output_linear"] = plain
    return replace(FORMATS[name], others=others)


def plain(weight):
    return {"weight": weight}, weight


def load(folder, **options):
    return load_model(folder, device=torch.device("cpu"), dtype=torch.float32, **options)


def products(layer, num_inputs):
    """Returns all that a layer maps single inputs to, in one order of heads."""
    x = torch.eye(num_inputs)
    if isinstance(layer, GatedQKVLinear):
        return torch.cat([each.flatten(1) for each in layer.forward_gated(x)], dim=-1)
    return layer.method.product(layer, x, None)


def matrices(experts):
    """Returns the values of a layer's experts."""
    for weights, scales, num_parts in (
        (experts.gate_up_proj, experts.gate_up_proj_scale, experts.num_parts),
        (experts.down_proj, experts.down_proj_scale, 1),
    ):
        for index, weight in enumerate(weights):
            scale = None if scales is None else scales[index]
            yield expert_values(weight, scale, torch.float32, num_parts=num_parts)


def multiplied_out(layer, x, bias):
    """Multiplies with an FP8 weight by block, without rounding x."""
    scale = layer.weight_scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    rows, columns = layer.weight.shape
    return functional.linear(x, layer.weight.float() * scale[:rows, :columns], bias)


def quantizable_layers(model):
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, QuantizableLinear | Experts)
    }


@each_form
@each_family
def test_dequantised_weights_have_their_values(written, family, form):
    stored, plain = written(family, form)
    expected = load(plain).state_dict()
    for name, value in load(stored).state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-7, msg=name)


@each_form
@each_family
def test_kept_weights_have_the_dequantised_values_on_every_rank(written, family, form):
    stored, plain = written(family, form)
    # Scales of 4-bit weights are rounded to bfloat16.
    error = 1e-5 if "fp8" in form else 2**-8
    for group in RANKS:
        kept = quantizable_layers(load(stored, keep_quantized=True, group=group))
        for name, layer in quantizable_layers(load(plain, group=group)).items():
            if isinstance(layer, Experts):
                pairs = zip(matrices(kept[name]), matrices(layer), strict=True)
            else:
                num_inputs = layer.weight.shape[1]
                pairs = [[products(each, num_inputs) for each in (kept[name], layer)]]
            for value, expected in pairs:
                torch.testing.assert_close(value, expected, rtol=error, atol=1e-5, msg=name)


# Left as they are: rows of one number for each head, and what the writer leaves alone.
PLAIN = ("in_proj_ba", "kv_a_proj_with_mqa", "b_proj", "g_proj")
UNKEPT = {
    # Experts take columns in order only.
    "gptq-act-order": ("experts", "fg_proj", "in_proj_qkvz"),
    # Gates of single heads are stored plain, and share a layer with others of the name.
    "awq": ("fg_proj", "in_proj_qkvz"),
}
"""Ends of the names of layers that are dequantised in a format, besides."""


@each_form
@each_family
def test_all_that_products_take_is_kept(written, family, form):
    stored, _ = written(family, form)
    model = load(stored, keep_quantized=True)
    allowed = PLAIN + UNKEPT.get(form, ())
    if family == "granite_hybrid" and "fp8" not in form:
        allowed += ("experts",)
    for name, layer in quantizable_layers(model).items():
        is_plain = (
            layer.down_proj_scale is None
            if isinstance(layer, Experts)
            else layer.method is UNQUANTIZED
        )
        assert not is_plain or name.endswith(allowed), name


@pytest.mark.parametrize("family", ["qwen3_5", "falcon_h1", "olmo_hybrid", "nemotron_h"])
def test_logits_of_kept_blocks_are_those_of_their_values(written, family):
    stored, plain = written(family, "fp8-block")
    kept = load(stored, keep_quantized=True)
    for layer in quantizable_layers(kept).values():
        if layer.method is FP8_BLOCKS:
            layer.method = replace(layer.method, product=multiplied_out)
    logits, expected = (
        runner.run(runner.add(TOKENS), chunk_size=4)
        for runner in (PagedRunner(kept), PagedRunner(load(plain)))
    )
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
