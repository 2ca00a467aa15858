"""Draft layers of MiMo-V2 and DeepSeek V4 against their formulas in plain PyTorch.

Sources of the formulas: SGLang, models/mimo_v2_flash_nextn.py, whose worker passes states before
the last norm; MTPBlock in inference/model.py of the released DeepSeek-V4-Flash.
"""

import pytest
import torch
from torch.nn.functional import rms_norm

from models.config import ModelConfig
from models.cudagraph_mode import CUDAGraphMode
from models.deepseek_mtp import DeepseekMTP
from models.loading.loader import load_model
from services.engine.batch import read_int32
from services.engine.config.compilation_level import CompilationLevel
from tests.support.compilation import compilation_config
from tests.support.graph_engine import GraphEngine
from tests.support.local_draft_checkpoints import write_local_draft_checkpoint
from tests.support.ranks_core import ranks_config, ranks_core
from tests.support.step_driver import sampling
from tests.unit.models.test_deepseek_mtp import (
    CPU,
    PROMPT,
    DraftRunner,
    load,
    reference_model,
    require_close,
)

VARIANTS = ["mimo_v2", "mimo_v2_odd", "deepseek_v4", "deepseek_v4_odd"]
TOKENS = [*PROMPT, 33, 2, 71, 18, 20, 4, 61, 9]
FOLLOWING = [*TOKENS[1:], 23]


def last_layer(main):
    """Returns transformers' outputs of TOKENS, and those of its last layer."""
    seen = []
    layer = main.model.layers[main.config.num_hidden_layers - 1]
    hook = layer.register_forward_hook(lambda *arguments: seen.append(arguments[-1]))
    hidden = main.model(torch.tensor([TOKENS])).last_hidden_state[0]
    hook.remove()
    return hidden, seen[0][0].flatten(1)


def block_of(whole, states, window):
    """Runs transformers' last decoder layer on its input, [1, T, ...]."""
    length = states.shape[1]
    positions = torch.arange(length)[None]
    distance = positions.T - positions
    is_seen = (distance >= 0) & (distance < window)
    mask = torch.zeros(length, length).masked_fill(~is_seen, -torch.inf)[None, None]
    if whole.config.model_type == "deepseek_v4":
        kinds = ("main", "compress")
        rotation = {
            kind: whole.model.rotary_emb(states, position_ids=positions, layer_type=kind)
            for kind in kinds
        }
    else:
        rotation = whole.model.rotary_emb(states, positions, "sliding_attention")
    return whole.model.layers[-1](
        states,
        attention_mask=mask,
        position_ids=positions,
        position_embeddings=rotation,
        cache=None,
        input_ids=torch.tensor([FOLLOWING]),
    )[0]


def plain_drafts(whole, own, states, window):
    """Returns the hidden states, and the outputs of the draft layer, both of TOKENS."""
    config = whole.config
    size, eps = config.hidden_size, config.rms_norm_eps
    embedded = rms_norm(
        whole.model.embed_tokens.weight[FOLLOWING], (size,), own["enorm.weight"], eps
    )
    if "eh_proj.weight" in own:
        joined = torch.cat((embedded, rms_norm(states, (size,), own["hnorm.weight"], eps)), -1)
        out = block_of(whole, (joined @ own["eh_proj.weight"].T)[None], window)
        return rms_norm(out, (size,), own["final_layernorm.weight"], eps), out
    streams = states.view(len(states), -1, size)
    projected = rms_norm(streams, (size,), own["hnorm.weight"], eps) @ own["h_proj.weight"].T
    joined = (embedded @ own["e_proj.weight"].T).unsqueeze(1) + projected
    out = block_of(whole, joined[None], window)
    flat = out.flatten(1)
    factor = (flat.square().mean(-1, keepdim=True) + eps).rsqrt()
    mixes = flat @ own["hc_head_fn"].T * factor
    weights = (mixes * own["hc_head_scale"] + own["hc_head_base"]).sigmoid() + config.hc_eps
    collapsed = (weights.unsqueeze(-1) * out).sum(1)
    return rms_norm(collapsed, (size,), own["norm.weight"], eps), flat


@pytest.mark.parametrize("chunk_size", [64, 4])
@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_drafts_are_those_of_the_formula(tmp_path, variant, chunk_size):
    whole, own = write_local_draft_checkpoint(tmp_path, variant)
    runner = DraftRunner(load(tmp_path))
    outputs, drafted = runner.draft(runner.add(TOKENS), FOLLOWING, chunk_size=chunk_size)
    hidden, states = last_layer(reference_model(tmp_path))
    require_close(outputs, torch.cat((hidden, states), -1))
    window = ModelConfig.from_folder(tmp_path).draft_window
    assert window < len(TOKENS)
    normed, output = plain_drafts(whole, own, states, window)
    require_close(drafted, torch.cat((normed, output), -1))
    logits = normed @ whole.lm_head.weight.T
    require_close(runner.drafts.compute_logits(drafted, 0), logits)
    assert runner.drafts.most_likely(drafted, 0).tolist() == logits.argmax(-1).tolist()
    # Past the last draft layer it runs again, on its own output.
    _, again = runner.draft(
        runner.add(TOKENS), FOLLOWING, chunk_size=chunk_size, depth=1, hidden=drafted
    )
    require_close(again, torch.cat(plain_drafts(whole, own, output, window), -1))


@pytest.mark.parametrize("variant", ["mimo_v2", "deepseek_v4"])
def test_without_speculation_the_draft_layer_is_passed_over(tmp_path, variant):
    write_local_draft_checkpoint(tmp_path, variant)
    model = load_model(tmp_path, device=CPU, dtype=torch.float32)
    config = ModelConfig.from_folder(tmp_path)
    assert len(model.cache_specs()) == len(config.cache_windows)
    assert model.output_size == config.hidden_size
    with pytest.raises(ValueError, match="without draft layers"):
        DeepseekMTP(model)
    drafting = load(tmp_path)
    windows = config.entry_windows(with_draft_layers=True)
    assert len(drafting.cache_specs()) == len(windows)
    assert windows[-1] is not None


PROMPTS = [[5, 17, 3], [44, 2, 9, 9, 31, 60, 7, 8, 1, 90], [12], [6, 17, 3, 8, 8], [70] * 17]


MODES = {
    "eager": {"cudagraph_mode": CUDAGraphMode.NONE},
    "pieces": {"level": CompilationLevel.PIECEWISE, "cudagraph_mode": CUDAGraphMode.NONE},
    "graphs": {
        "cudagraph_mode": CUDAGraphMode.FULL_DECODE_ONLY,
        "cudagraph_capture_sizes": (3, 6, 15),
    },
}


@pytest.mark.parametrize("agreement", [0.0, 0.98])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_tokens_are_those_without_drafts(tmp_path, variant, mode, agreement):
    torch.set_num_threads(1)
    write_local_draft_checkpoint(tmp_path, variant, agreement=agreement)
    config = compilation_config(
        use_inductor=False, compile_cache_dir=tmp_path / "cache", **MODES[mode]
    )
    sizes = {"max_num_batched_tokens": 16, "max_model_len": 128, "num_blocks": 60}
    expected = GraphEngine(tmp_path, config, **sizes).run(PROMPTS, 40)
    drafting = GraphEngine(tmp_path, config, num_speculative_tokens=2, **sizes)
    assert {outcome.fault for outcome in drafting.capture()} <= {""}
    assert drafting.run(PROMPTS, 40) == expected
    assert drafting.run(PROMPTS, 40) == expected
    accepted = sum(read_int32(result.num_accepted_tokens).sum() for _, result in drafting.steps)
    assert accepted > 0 or not agreement
    assert any(result.drafted_by_graph for _, result in drafting.steps) == (mode == "graphs")


@pytest.mark.parametrize("variant", ["mimo_v2", "deepseek_v4"])
async def test_ranks_draft_and_give_the_tokens_of_one(tmp_path, variant):
    torch.set_num_threads(1)
    write_local_draft_checkpoint(tmp_path, variant, agreement=0.98)
    sizes = {"max_model_len": 128, "max_num_batched_tokens": 16}
    expected = GraphEngine(tmp_path, compilation_config(), num_blocks=200, **sizes).run(PROMPTS, 12)
    config = ranks_config(
        tmp_path, tensor_parallel_size=2, num_kv_blocks=200, num_speculative_tokens=2, **sizes
    )
    async with ranks_core(config) as ranks:
        assert await ranks.generate(PROMPTS, sampling(max_tokens=12)) == expected
