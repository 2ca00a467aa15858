"""The text part of a checkpoint that also has a part for images."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.loading.loader import load_model
from tests.support.paged_runner import PagedRunner
from tests.support.random_checkpoints import transformers_logits, write_checkpoint

TOKENS = [5, 17, 3, 44, 2, 9, 9, 31, 60]
# Releases before and after transformers 4.52.
NAMES = [
    ("language_model.model.", "vision_tower.vision_model.", "multi_modal_projector."),
    ("model.language_model.", "model.vision_tower.vision_model.", "model.multi_modal_projector."),
]


@pytest.mark.parametrize(("text", "vision", "projector"), NAMES)
def test_text_is_served_and_images_are_passed_over(tmp_path, text, vision, projector):
    reference = write_checkpoint(tmp_path, "gemma3")
    weights = load_file(tmp_path / "model.safetensors")
    named = {text + name.removeprefix("model."): x for name, x in weights.items()}
    named[vision + "encoder.layers.0.self_attn.q_proj.weight"] = torch.randn(6, 6)
    # A part that is not served may be quantised in any way.
    named[vision + "encoder.layers.0.mlp.fc1.weight_packed"] = torch.ones(6, 6, dtype=torch.int32)
    named[projector + "mm_input_projection_weight"] = torch.randn(6, 6)
    save_file(named, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    whole = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": config,
        "vision_config": {"hidden_size": 6},
    }
    (tmp_path / "config.json").write_text(json.dumps(whole))
    model = load_model(tmp_path, device=torch.device("cpu"), dtype=torch.float32)
    runner = PagedRunner(model)
    expected = transformers_logits(reference, TOKENS)
    logits = runner.run(runner.add(TOKENS), 4)
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()
