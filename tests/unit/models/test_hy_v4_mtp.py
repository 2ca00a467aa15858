"""The draft layer of Hy4 against its formula in plain PyTorch.

Source of the formula: vLLM, models/hy_v4/nvidia/mtp.py, and NeMo Automodel, models/hy_v4/model.py.
"""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import rms_norm

from models.cudagraph_mode import CUDAGraphMode
from models.deepseek_mtp import DeepseekMTP
from models.loading.loader import load_model
from services.engine.batch import read_int32
from tests.support.compilation import compilation_config
from tests.support.graph_engine import GraphEngine
from tests.support.random_checkpoints import VARIANTS, write_checkpoint
from tests.unit.models.test_deepseek_mtp import CPU, PROMPT, DraftRunner, load, require_close

TOKENS = [*PROMPT, 33, 2, 71, 18, 20, 4, 61, 9]
FOLLOWING = [*TOKENS[1:], 23]
DRAFT = "model.mtp_layers.0."


def write_draft(folder, variant, *, agreement=0.0):
    """Writes a checkpoint with a draft layer; agreement makes it guess as the model does.

    Returns transformers' model with one more layer, whose parts are the draft layer's, and the
    layer's own tensors.
    """
    changes = VARIANTS[variant][2]
    count = changes["num_hidden_layers"]
    lists = {"indexer_types": "full", "mlp_layer_types": "sparse"}
    whole = write_checkpoint(
        folder,
        variant,
        num_hidden_layers=count + 1,
        **{name: [*changes[name], last] for name, last in lists.items()},
    )
    size, generator = whole.config.hidden_size, torch.Generator().manual_seed(1)

    def draw(*shape, center=0.0):
        return torch.empty(shape).normal_(center, 0.3, generator=generator)

    norms = ("enorm.weight", "hnorm.weight", "final_layernorm.weight")
    own = {name: draw(size, center=1.0) for name in norms} | {
        "eh_proj.weight": draw(size, 2 * size)
    }
    file = folder / "model.safetensors"
    tensors = {
        re.sub(rf"^model\.layers\.{count}\.", DRAFT, name): tensor
        for name, tensor in load_file(file).items()
    }
    tensors = {
        name: tensor
        for name, tensor in tensors.items()
        if not (name.startswith(DRAFT) and "hc_" in name)
    }
    if agreement:
        for name, tensor in tensors.items():
            if any(part in name for part in ("o_proj.", "down_proj")):
                tensor *= 1 - agreement
        own["enorm.weight"].fill_(1.0)
        own["final_layernorm.weight"].copy_(tensors["model.norm.weight"])
        own["eh_proj.weight"].zero_()[:, :size] = torch.eye(size)
    tensors |= {DRAFT + name: tensor for name, tensor in own.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    config_file = folder / "config.json"
    config = json.loads(config_file.read_text())
    config.pop("layer_types", None)  # all are alike
    config |= {name: changes[name] for name in lists}
    config |= {"num_hidden_layers": count, "num_nextn_predict_layers": 2}
    config_file.write_text(json.dumps(config))
    return whole, own


def plain_drafts(whole, own, hidden):
    """norm(block(eh_proj [norm(embedding), norm(hidden)])), around the parts of transformers."""
    size, eps = (hidden.shape[-1],), whole.config.rms_norm_eps
    embedded = whole.model.embed_tokens.weight[FOLLOWING]
    joined = torch.cat(
        (
            rms_norm(embedded, size, own["enorm.weight"], eps),
            rms_norm(hidden, size, own["hnorm.weight"], eps),
        ),
        dim=-1,
    )
    states = (joined @ own["eh_proj.weight"].T)[None]
    length = states.shape[1]
    positions = torch.arange(length)[None]
    block = whole.model.layers[-1]
    attended = block.self_attn(
        block.input_layernorm(states),
        attention_mask=torch.full((length, length), -torch.inf).triu(1)[None, None],
        position_ids=positions,
        position_embeddings=whole.model.rotary_emb(states, positions),
    )[0]
    states = states + attended
    states = states + block.mlp(block.post_attention_layernorm(states))
    normed = rms_norm(states[0], size, own["final_layernorm.weight"], eps)
    return normed, normed @ whole.lm_head.weight.T


@pytest.mark.parametrize(
    ("variant", "chunk_size"),
    [
        ("hy_v4", 4),
        pytest.param("hy_v4", 64, marks=pytest.mark.families),
        pytest.param("hy_v4_odd", 5, marks=pytest.mark.families),
    ],
)
@torch.no_grad()
def test_drafts_are_those_of_the_formula(tmp_path, variant, chunk_size):
    whole, own = write_draft(tmp_path, variant)
    runner = DraftRunner(load(tmp_path))
    hidden, drafted = runner.draft(runner.add(TOKENS), FOLLOWING, chunk_size=chunk_size)
    normed, logits = plain_drafts(whole, own, hidden)
    require_close(drafted, normed)
    require_close(runner.drafts.compute_logits(drafted, 0), logits)


@pytest.mark.families
def test_without_speculation_the_draft_layer_is_passed_over(tmp_path):
    write_draft(tmp_path, "hy_v4")
    model = load_model(tmp_path, device=CPU, dtype=torch.float32)
    with pytest.raises(ValueError, match="without draft layers"):
        DeepseekMTP(model)


PROMPTS = [[5, 17, 3], [44, 2, 9, 9, 31, 60, 7, 8, 1, 90], [12], [70] * 17]


@pytest.mark.families
@pytest.mark.parametrize("agreement", [0.0, 0.98])
@pytest.mark.parametrize("variant", ["hy_v4", "hy_v4_odd"])
@pytest.mark.parametrize("mode", [CUDAGraphMode.NONE, CUDAGraphMode.FULL_DECODE_ONLY])
def test_tokens_are_those_without_drafts(tmp_path, variant, mode, agreement):
    torch.set_num_threads(1)
    write_draft(tmp_path, variant, agreement=agreement)
    config = compilation_config(cudagraph_mode=mode, cudagraph_capture_sizes=(3, 6, 12))
    sizes = {"max_num_batched_tokens": 16, "max_model_len": 128, "num_blocks": 60}
    expected = GraphEngine(tmp_path, config, **sizes).run(PROMPTS, 30)
    drafting = GraphEngine(tmp_path, config, num_speculative_tokens=2, **sizes)
    assert {outcome.fault for outcome in drafting.capture()} <= {""}
    assert drafting.run(PROMPTS, 30) == expected
    accepted = sum(read_int32(result.num_accepted_tokens).sum() for _, result in drafting.steps)
    assert accepted > 0 or not agreement
