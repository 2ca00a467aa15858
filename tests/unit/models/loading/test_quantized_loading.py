"""Checkpoints with FP8 weights: dequantised, kept, shared out and made up."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from models.layers.quantization import FP8_BLOCKS, FP8_ROWS, UNQUANTIZED, fits_fp8, use_fp8
from models.loading.loader import load_model
from models.parallel.group import SINGLE, ParallelGroup
from tests.support.paged_runner import PagedRunner
from tests.support.quantized_checkpoints import BLOCK, FP8, KINDS, WIDE, quantize_checkpoint
from tests.support.random_checkpoints import write_checkpoint

CPU = torch.device("cpu")
FP8_ERROR = 0.05
"""Largest error of a product, relative to its norm, from rounding activations to FP8."""
each_kind = pytest.mark.parametrize("kind", KINDS)
GROUPS = [ParallelGroup(rank=rank, size=2) for rank in range(2)]


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wide")
    write_checkpoint(folder, "llama", **WIDE)
    return folder


@pytest.fixture
def load(wide, tmp_path):
    """Returns a function from a kind to (loaded model, the checkpoint's tensors in float32)."""

    def load(kind, **options):
        plain = quantize_checkpoint(wide, tmp_path, kind)
        return load_model(tmp_path, device=CPU, dtype=torch.float32, **options), plain

    return load


def logits(model):
    runner = PagedRunner(model)
    return runner.run(runner.add([5, 96, 0, 48, 49, 17, 33, 80, 2, 61]), chunk_size=4)


def expected_packed(plain, layer, *names):
    return torch.cat([plain[f"model.layers.{layer}.{name}.weight"] for name in names])


QKV = [f"self_attn.{name}_proj" for name in "qkv"]


@each_kind
def test_weights_are_multiplied_out_exactly(load, kind):
    model, plain = load(kind)
    layer = model.model.layers[1]
    assert layer.self_attn.qkv_proj.method is UNQUANTIZED
    assert torch.equal(layer.self_attn.qkv_proj.weight, expected_packed(plain, 1, *QKV))
    assert torch.equal(layer.mlp.down_proj.weight, plain["model.layers.1.mlp.down_proj.weight"])


@each_kind
def test_kept_weights_and_scales_are_the_stored_ones(load, kind):
    model, plain = load(kind, keep_quantized=True)
    qkv = model.model.layers[1].self_attn.qkv_proj
    is_blocked = KINDS[kind][0] == "block"
    assert qkv.method is (FP8_BLOCKS if is_blocked else FP8_ROWS)
    assert qkv.weight.dtype == FP8
    scale = qkv.weight_scale
    if is_blocked:
        scale = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    assert torch.equal(qkv.weight.float() * scale, expected_packed(plain, 1, *QKV))
    assert model.lm_head.weight.dtype == torch.float32


@each_kind
def test_products_of_kept_weights_are_near_the_dequantised_ones(load, kind):
    layers = [load(kind, keep_quantized=kept)[0].model.layers[1] for kept in (False, True)]
    for path, size in (("self_attn.qkv_proj", 256), ("mlp.down_proj", 384)):
        x = torch.randn(5, size)
        exact, rounded = (layer.get_submodule(path)(x) for layer in layers)
        assert 0 < (rounded - exact).norm() / exact.norm() < FP8_ERROR


@each_kind
def test_kept_weights_serve_a_whole_model(load, kind):
    assert logits(load(kind, keep_quantized=True)[0]).isfinite().all()


@pytest.mark.parametrize("kind", ["deepseek", "compressed_channel"])
def test_heads_in_another_order_keep_their_scales(kind, tmp_path):
    plain, folder = tmp_path / "plain", tmp_path / "fp8"
    folder.mkdir()
    sizes = {"q_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64}
    write_checkpoint(plain, "deepseek_v3", **WIDE | {"num_key_value_heads": 4} | sizes)
    quantize_checkpoint(plain, folder, kind)
    multiplied, kept = (
        load_model(folder, device=CPU, dtype=torch.float32, keep_quantized=is_kept)
        .model.layers[1]
        .self_attn.q_b_proj
        for is_kept in (False, True)
    )
    scale = kept.weight_scale
    if kept.method is FP8_BLOCKS:
        scale = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    assert kept.weight.dtype == FP8
    assert torch.equal(kept.weight.float() * scale, multiplied.weight)


def test_layers_that_blocks_do_not_divide_are_dequantised(tmp_path, checkpoint):
    # Heads of 8 features: keys do not begin at a block.
    plain = quantize_checkpoint(checkpoint("llama")[0], tmp_path, "deepseek")
    model = load_model(tmp_path, device=CPU, dtype=torch.float32, keep_quantized=True)
    layer = model.model.layers[0]
    assert torch.equal(layer.self_attn.qkv_proj.weight, expected_packed(plain, 0, *QKV))
    assert layer.self_attn.o_proj.method is FP8_BLOCKS


def test_a_weight_that_the_checkpoint_left_alone_stays_so(load, wide, tmp_path):
    load("deepseek")
    name = "model.layers.0.self_attn.k_proj.weight"
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors.pop(f"{name}_scale_inv")
    tensors[name] = load_file(wide / "model.safetensors")[name]
    save_file(tensors, file)
    model = load_model(tmp_path, device=CPU, dtype=torch.float32, keep_quantized=True)
    # It is packed with two FP8 weights, and one parameter has one dtype.
    assert model.model.layers[0].self_attn.qkv_proj.method is UNQUANTIZED
    assert model.model.layers[1].self_attn.qkv_proj.method is FP8_BLOCKS


@each_kind
@pytest.mark.parametrize("keep_quantized", [False, True])
def test_dummy_weights_of_quantised_models_are_sane(load, kind, keep_quantized):
    model, _ = load(kind, load_format="dummy", keep_quantized=keep_quantized)
    qkv = model.model.layers[0].self_attn.qkv_proj
    assert (qkv.method is not UNQUANTIZED) == keep_quantized
    result = logits(model)
    assert result.isfinite().all()
    assert 0.1 < result.std() < 10
    again, _ = load(kind, load_format="dummy", keep_quantized=keep_quantized)
    assert torch.equal(logits(again), result)


def test_dummy_weights_leave_ignored_modules_alone(load, tmp_path):
    load("deepseek")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["lm_head", "model.layers.0"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_model(
        tmp_path, device=CPU, dtype=torch.float32, load_format="dummy", keep_quantized=True
    )
    methods = [layer.self_attn.qkv_proj.method for layer in model.model.layers]
    assert methods == [UNQUANTIZED, FP8_BLOCKS]


def quantized_layer(make, block_size, tensors):
    """Builds a layer in FP8 and loads {"weight": [one tensor per shard id], ...}."""
    layer = make()
    assert fits_fp8(layer, block_size)
    use_fp8(layer, block_size)
    for name, shards in tensors.items():
        for shard_id, tensor in enumerate(shards):
            layer.weight_loader(getattr(layer, name), tensor, shard_id)
    return layer


def random_fp8(rows, columns, *, is_blocked):
    weight = torch.randn(rows, columns).to(FP8)
    shape = (-(-rows // BLOCK), -(-columns // BLOCK)) if is_blocked else (rows, 1)
    return weight, torch.rand(shape) + 0.5


@pytest.mark.parametrize("is_blocked", [True, False])
def test_column_shards_hold_the_scales_of_their_rows(is_blocked):
    block_size = (BLOCK, BLOCK) if is_blocked else None
    parts = [random_fp8(rows, 208, is_blocked=is_blocked) for rows in (512, 256)]
    tensors = dict(zip(("weight", "weight_scale"), zip(*parts, strict=True), strict=True))

    def layer(group):
        return quantized_layer(
            lambda: MergedColumnParallelLinear(208, [512, 256], bias=False, group=group),
            block_size,
            tensors,
        )

    x = torch.randn(3, 208)
    whole = layer(SINGLE)(x).split((512, 256), dim=-1)
    pieces = [layer(group)(x).split((256, 128), dim=-1) for group in GROUPS]
    for part in range(2):
        together = torch.cat([piece[part] for piece in pieces], dim=-1)
        torch.testing.assert_close(together, whole[part])


@pytest.mark.parametrize("is_blocked", [True, False])
def test_row_shards_hold_the_scales_of_their_columns(is_blocked):
    block_size = (BLOCK, BLOCK) if is_blocked else None
    weight, scale = random_fp8(144, 512, is_blocked=is_blocked)
    tensors = {"weight": [weight], "weight_scale": [scale]}
    layers = [
        quantized_layer(
            lambda group=group: RowParallelLinear(512, 144, bias=False, group=group),
            block_size,
            tensors,
        )
        for group in (SINGLE, *GROUPS)
    ]

    def numbers(layer):
        scale = layer.weight_scale
        if is_blocked:
            scale = scale.repeat_interleave(BLOCK, 0)[:144].repeat_interleave(BLOCK, 1)
        return layer.weight.float() * scale

    whole, *pieces = map(numbers, layers)
    assert torch.equal(torch.cat(pieces, dim=1), whole)


@pytest.mark.parametrize(
    ("make", "fits"),
    [
        (lambda group: MergedColumnParallelLinear(100, [576], bias=False, group=group), [1, 0]),
        (lambda group: MergedColumnParallelLinear(100, [576, 64], bias=False, group=group), [0, 0]),
        (lambda group: MergedColumnParallelLinear(100, [128, 64], bias=False, group=group), [1, 0]),
        (lambda group: MergedColumnParallelLinear(100, [256, 64], bias=False, group=group), [1, 1]),
        (
            lambda group: MergedColumnParallelLinear(100, [256, 192], bias=False, group=group),
            [1, 0],
        ),
        (lambda group: RowParallelLinear(384, 100, bias=False, group=group), [1, 0]),
        (lambda group: RowParallelLinear(512, 100, bias=False, group=group), [1, 1]),
    ],
)
def test_blocks_are_kept_where_no_shard_cuts_one(make, fits):
    found = [fits_fp8(make(group), (BLOCK, BLOCK)) for group in (SINGLE, GROUPS[0])]
    assert found == [bool(fit) for fit in fits]


def test_blocks_of_another_size_are_dequantised():
    layer = RowParallelLinear(512, 128, bias=False, group=SINGLE)
    assert not fits_fp8(layer, (64, 128))
    assert not fits_fp8(RowParallelLinear(500, 128, bias=False, group=SINGLE), None)


def test_a_scale_of_the_wrong_shape_is_refused_by_the_layer():
    layer = MergedColumnParallelLinear(200, [256], bias=False, group=SINGLE)
    use_fp8(layer, (BLOCK, BLOCK))
    with pytest.raises(ValueError, match=r"\(3, 2\); the model needs \(2, 2\)"):
        layer.weight_loader(layer.weight_scale, torch.ones(3, 2), 0)
