"""The draft layer of Nemotron-H against its formula in plain PyTorch."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import rms_norm

from models.config import ConfigError, ModelConfig
from models.cudagraph_mode import CUDAGraphMode
from services.engine.batch import read_int32
from tests.support.compilation import compilation_config
from tests.support.graph_engine import GraphEngine
from tests.support.random_checkpoints import write_checkpoint
from tests.unit.models.test_deepseek_mtp import PROMPT, DraftRunner, load, require_close

LAYERS = ["linear_attention", "moe", "full_attention", "mlp", "moe"]
NUM_LAYERS = len(LAYERS)


def write_draft_checkpoint(folder):
    """Writes a checkpoint whose last two layers are under `mtp.`; returns the whole and the rest.

    That is transformers' model of all layers, and the tensors around the draft layer's parts.
    """
    types = [*LAYERS, "full_attention", "moe"]
    whole = write_checkpoint(folder, "nemotron_h_moe", layers_block_type=types)
    file, size = folder / "model.safetensors", whole.config.hidden_size
    generator = torch.Generator().manual_seed(1)

    def draw(*shape, center=0.0):
        return torch.empty(shape).normal_(center, 0.3, generator=generator)

    own = {
        "mtp.layers.0.eh_proj.weight": draw(size, 2 * size),
        "mtp.layers.0.enorm.weight": draw(size, center=1.0),
        "mtp.layers.0.hnorm.weight": draw(size, center=1.0),
        "mtp.layers.1.final_layernorm.weight": draw(size, center=1.0),
    }
    tensors = dict(own)
    for name, tensor in load_file(file).items():
        for number in range(2):
            prefix = f"backbone.layers.{NUM_LAYERS + number}."
            name = name.replace(prefix, f"mtp.layers.{number}.")
        tensors[name] = tensor
    save_file(tensors, file, metadata={"format": "pt"})
    change_config(
        folder, num_hidden_layers=NUM_LAYERS, layers_block_type=LAYERS, num_nextn_predict_layers=1
    )
    return whole, own


def change_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("chunk_size", [64, 4])
@torch.no_grad()
def test_drafts_are_those_of_the_formula(tmp_path, chunk_size):
    whole, own = write_draft_checkpoint(tmp_path)
    runner = DraftRunner(load(tmp_path))
    following = [*PROMPT[1:], 23]
    hidden, drafted = runner.draft(runner.add(PROMPT), following, chunk_size=chunk_size)

    def norm(x, name):
        eps = whole.config.layer_norm_epsilon
        return rms_norm(x, (x.shape[-1],), own[f"mtp.layers.{name}.weight"], eps)

    embedded = whole.get_input_embeddings().weight[following]
    joined = torch.cat((norm(embedded, "0.enorm"), norm(hidden, "0.hnorm")), dim=-1)
    states = (joined @ own["mtp.layers.0.eh_proj.weight"].T)[None]
    mask = torch.full((len(following),) * 2, -torch.inf).triu(1)[None, None]
    for layer in whole.model.layers[NUM_LAYERS:]:
        states = layer(states, attention_mask=mask)
    normed = norm(states[0], "1.final_layernorm")
    require_close(drafted, normed)
    require_close(runner.drafts.compute_logits(drafted, 0), normed @ whole.lm_head.weight.T)


def test_tokens_are_those_without_drafts(tmp_path):
    write_draft_checkpoint(tmp_path)
    eager = compilation_config(cudagraph_mode=CUDAGraphMode.NONE)
    prompts = [PROMPT, PROMPT * 7, [3]]
    sizes = {"max_model_len": 128, "block_size": 16, "num_blocks": 200}
    expected = GraphEngine(tmp_path, eager, **sizes).run(prompts, 30)
    engine = GraphEngine(tmp_path, eager, **sizes, num_speculative_tokens=2)
    for _ in range(2):
        assert engine.run(prompts, 30) == expected
    made = [each for _, result in engine.steps for each in read_int32(result.draft_token_ids)]
    assert max(made) > 0


def test_a_draft_layer_of_other_parts_is_refused(tmp_path):
    write_draft_checkpoint(tmp_path)
    ModelConfig.from_folder(tmp_path).require_draft_layers()
    change_config(tmp_path, mtp_layers_block_type=["linear_attention", "moe"])
    with pytest.raises(ConfigError, match="layers of kinds unknown here"):
        ModelConfig.from_folder(tmp_path).require_draft_layers()
