"""The draft layer of Qwen3-Next and Qwen3.5 against its formula in plain PyTorch."""

import pytest
import torch
from torch.nn.functional import rms_norm

from models.config import ConfigError, ModelConfig
from models.deepseek_mtp import DeepseekMTP
from models.loading.loader import load_model
from tests.support.mtp_checkpoints import NUM_LAYERS, write_mtp_checkpoint
from tests.unit.models.test_deepseek_mtp import CPU, PROMPT, DraftRunner, load, require_close

VARIANTS = ["qwen3_next", "qwen3_5", "qwen3_5_odd", "qwen3_5_moe"]


def plain_drafts(whole, own, following, hidden):
    """norm(block(fc [norm(embedding), norm(hidden)])), around transformers' decoder layer."""
    size, eps = (hidden.shape[-1],), whole.config.rms_norm_eps

    def norm(x, name):
        return rms_norm(x, size, 1.0 + own[f"mtp.{name}.weight"], eps)

    embedded = norm(whole.model.embed_tokens.weight[following], "pre_fc_norm_embedding")
    joined = torch.cat((embedded, norm(hidden, "pre_fc_norm_hidden")), dim=-1)
    projected = (joined @ own["mtp.fc.weight"].T)[None]
    length = projected.shape[1]
    positions = torch.arange(length)[None]
    out = whole.model.layers[NUM_LAYERS](
        projected,
        attention_mask=torch.full((length, length), -torch.inf).triu(1)[None, None],
        position_ids=positions,
        position_embeddings=whole.model.rotary_emb(projected, positions),
    )
    normed = norm((out[0] if isinstance(out, tuple) else out)[0], "norm")
    return normed, normed @ whole.lm_head.weight.T


@pytest.mark.parametrize("chunk_size", [64, 4])
@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_drafts_are_those_of_the_formula(tmp_path, variant, chunk_size):
    whole, own = write_mtp_checkpoint(tmp_path, variant)
    runner = DraftRunner(load(tmp_path))
    following = [*PROMPT[1:], 23]
    hidden, drafted = runner.draft(runner.add(PROMPT), following, chunk_size=chunk_size)
    normed, logits = plain_drafts(whole, own, following, hidden)
    require_close(drafted, normed)
    require_close(runner.drafts.compute_logits(drafted, 0), logits)


def test_without_speculation_the_draft_layer_is_passed_over(tmp_path):
    write_mtp_checkpoint(tmp_path, "qwen3_5")
    model = load_model(tmp_path, device=CPU, dtype=torch.float32)
    assert len(model.cache_specs()) == NUM_LAYERS
    with pytest.raises(ValueError, match="without draft layers"):
        DeepseekMTP(model)


def test_the_cache_of_the_draft_layer_follows_the_others(tmp_path):
    write_mtp_checkpoint(tmp_path, "qwen3_5")
    model = load(tmp_path)
    assert len(model.cache_specs()) == NUM_LAYERS + 1
    windows = model.config.entry_windows(with_draft_layers=True)
    assert windows == ("state", "state", None, "state", None)


def test_several_draft_layers_are_refused(tmp_path):
    write_mtp_checkpoint(tmp_path, "qwen3_5", mtp_num_hidden_layers=2)
    with pytest.raises(ConfigError, match="Qwen3_5ForCausalLM, not 2"):
        ModelConfig.from_folder(tmp_path).require_draft_layers()
