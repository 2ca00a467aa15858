"""States of models that keep some, through the paged cache."""

import json
import random
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.batch_invariance import use_batch_invariance
from models.forward_context import forward_context
from models.layers.state_mixer import CausalConv
from models.loading.checkpoint import CheckpointError
from models.loading.loader import load_model
from models.parallel.group import SINGLE, ParallelGroup, PipelineStage
from tests.support.paged_runner import PagedRunner
from tests.support.random_checkpoints import transformers_logits, write_checkpoint

CPU = torch.device("cpu")
TOKENS = random.Random(1).choices(range(97), k=125)
PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
VARIANTS = [
    *("qwen3_5_odd", "granite_hybrid", "lfm2_odd", "kimi_linear_odd", "minimax", "falcon_h1_odd"),
]
"""One of each kind of state, and one with attention and a state in each layer."""


@pytest.fixture
def _invariant():
    use_batch_invariance(is_on=True)
    yield
    use_batch_invariance(is_on=False)


@pytest.mark.parametrize("chunk_size", [125, 37, 5])
@pytest.mark.parametrize("variant", VARIANTS)
def test_chunks_over_several_of_the_rules_give_the_logits_of_transformers(
    checkpoint, variant, chunk_size
):
    folder, reference = checkpoint(variant)
    runner = PagedRunner(load_model(folder, device=CPU, dtype=torch.float32))
    logits = runner.run(runner.add(TOKENS), chunk_size)
    expected = transformers_logits(reference, TOKENS)
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.usefixtures("_invariant")
@pytest.mark.parametrize("variant", VARIANTS)
def test_bits_do_not_depend_on_chunks_or_other_requests(checkpoint, variant):
    folder, _ = checkpoint(variant)
    model = load_model(folder, device=CPU, dtype=torch.bfloat16)
    runner = PagedRunner(model)
    whole = runner.run(runner.add(TOKENS[:70]), 70)
    runner = PagedRunner(model)
    sequence, others = runner.add(TOKENS[:70]), [runner.add(TOKENS[n:]) for n in (3, 40)]
    pieces = []
    for size in (1, 37, 5, 26, 1):
        chunks = [(others[0], 2), (sequence, size), (others[1], size)]
        pieces.append(runner.step(chunks)[1])
    assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.parametrize("variant", VARIANTS)
def test_dummy_requests_disturb_no_state(checkpoint, variant):
    """Two of them share the null block, and rows of graphs have no tokens."""
    folder, _ = checkpoint(variant)
    model = load_model(folder, device=CPU, dtype=torch.float32)
    runner = PagedRunner(model)
    sequences = [runner.add(TOKENS[:8]), runner.add(TOKENS[:1]), runner.add(TOKENS[:1])]
    runner.step([(sequences[0], 7)])
    input_ids, context = runner.prepare([(sequences[0], 1), (sequences[1], 1), (sequences[2], 1)])
    metadata = []
    for each in context.layer_attn_metadata:
        tables, lengths = each.block_tables.clone(), each.seq_lens.clone()
        tables[1:], lengths[1:] = 0, 0
        metadata.append(replace(each, block_tables=tables, seq_lens=lengths))
    with forward_context(replace(context, layer_attn_metadata=tuple(metadata))):
        hidden = model(input_ids, context.context.positions)
    alone = PagedRunner(model)
    expected = alone.run(alone.add(TOKENS[:8]), 7)
    torch.testing.assert_close(model.compute_logits(hidden)[0], expected[-1])


@pytest.mark.parametrize(
    ("variant", "num_layers", "numbers"),
    [
        ("qwen3_5_odd", (1, 3), [[0], [0, 1, 2]]),
        ("falcon_h1_odd", (1, 1), [[0, 1], [0, 1]]),
        ("nemotron_h", (2, 3), [[0], [0, 1]]),
    ],
)
def test_a_stage_numbers_the_entries_of_its_layers(tmp_path, variant, num_layers, numbers):
    write_checkpoint(tmp_path, variant)
    stages = [PipelineStage(rank=rank, size=2, num_layers=num_layers) for rank in range(2)]
    models = [
        load_model(tmp_path, device=CPU, dtype=torch.float32, group=ParallelGroup(stage=stage))
        for stage in stages
    ]
    assert [len(model.cache_specs()) for model in models] == [len(each) for each in numbers]
    indices = [
        [module.layer_index for module in model.modules() if hasattr(module, "layer_index")]
        for model in models
    ]
    assert indices == numbers


def test_draft_layers_are_passed_over(tmp_path):
    reference = write_checkpoint(tmp_path, "qwen3_5")
    weights = load_file(tmp_path / "model.safetensors")
    weights["mtp.layers.0.self_attn.q_proj.weight"] = torch.randn(6, 6)
    weights["mtp.fc.weight"] = torch.randn(6, 6)
    save_file(weights, tmp_path / "model.safetensors")
    assert_serves(tmp_path, reference)
    save_file(weights | {"other.fc.weight": torch.randn(6)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="the model has no tensor other"):
        load_model(tmp_path, device=CPU, dtype=torch.float32)


@pytest.mark.parametrize("is_stacked", [False, True])
def test_experts_are_read_stacked_and_one_by_one(tmp_path, is_stacked):
    reference = write_checkpoint(tmp_path, "qwen3_5_moe")
    weights = load_file(tmp_path / "model.safetensors")
    experts = {name: weights.pop(name) for name in list(weights) if ".experts." in name}
    for layer in range(4):
        path = f"model.layers.{layer}.mlp.experts"
        stacked = dict(reference.named_parameters())
        for kind, parts in PARTS.items():
            values = stacked[f"{path}.{kind}"].detach()
            if is_stacked:
                weights[f"{path}.{kind}"] = values
                continue
            for expert, matrix in enumerate(values):
                for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True):
                    weights[f"{path}.{expert}.{part}.weight"] = rows.clone()
    assert experts
    save_file(weights, tmp_path / "model.safetensors")
    assert_serves(tmp_path, reference)


def test_config_json_may_have_infinity_as_transformers_writes_it(tmp_path):
    reference = write_checkpoint(tmp_path, "qwen3_5")
    config = json.loads((tmp_path / "config.json").read_text())
    config["time_step_limit"] = [0.0, {"__float__": "Infinity"}]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_serves(tmp_path, reference)


def assert_serves(folder, reference):
    runner = PagedRunner(load_model(folder, device=CPU, dtype=torch.float32))
    expected = transformers_logits(reference, TOKENS[:20])
    logits = runner.run(runner.add(TOKENS[:20]), 13)
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_parts_of_a_convolution_may_differ_in_size():
    """transformers itself stores equal parts, so no checkpoint of its own shows it."""
    parts = [torch.randn(size, 1, 3) for size in (4, 4, 6)]
    whole = CausalConv([4, 4, 6], 3, bias=False, group=SINGLE)
    whole.weight_loader(whole.weight, torch.cat(parts), 0)
    group = ParallelGroup(rank=1, size=2)
    half = CausalConv([4, 4, 6], 3, bias=False, group=group)
    for index, part in enumerate(parts):
        half.weight_loader(half.weight, part, index)
    expected = torch.cat([part.squeeze(1)[len(part) // 2 :] for part in parts])
    assert torch.equal(half.weight, expected)
    assert torch.equal(whole.weight, torch.cat(parts).squeeze(1))
