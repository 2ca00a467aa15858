"""Draft layers against transformers, and against plain PyTorch."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn.functional import rms_norm

from models.config import ConfigError
from models.deepseek_mtp import DeepseekMTP
from models.forward_context import forward_context
from models.loading.checkpoint import CheckpointError
from models.loading.loader import load_model
from tests.support.draft_checkpoints import NUM_LAYERS, write_draft_checkpoint
from tests.support.paged_runner import PagedRunner
from tests.support.random_checkpoints import write_checkpoint

CPU = torch.device("cpu")
PROMPT = [5, 17, 3, 44, 2, 9, 31, 60, 7, 8, 1]
EPS = 1e-6


def load(folder, **options):
    return load_model(folder, device=CPU, dtype=torch.float32, with_draft_layers=True, **options)


class DraftRunner(PagedRunner):
    """Also runs draft layers over the tokens of a step."""

    def __init__(self, model, **options):
        super().__init__(model, **options)
        self.drafts = DeepseekMTP(model)

    def draft(self, sequence, following, *, chunk_size, depth=0, hidden=None):
        """Computes a whole sequence's hidden states and drafts; returns both, [length, hidden].

        `following[i]` is the token that depth 0 joins with token i.
        """
        states, drafted = [], []
        while remaining := len(sequence.token_ids) - sequence.num_cached:
            chunk = min(chunk_size, remaining)
            start = sequence.num_cached
            self._grow(sequence, start + chunk)
            input_ids, context = self.prepare([(sequence, chunk)])
            positions = context.context.positions
            with forward_context(context), torch.inference_mode():
                made = self.model(input_ids, positions)
                given = made if hidden is None else hidden[start : start + chunk]
                tokens = torch.tensor(following[start : start + chunk])
                drafted.append(self.drafts(tokens, positions, given, depth))
            states.append(made)
            sequence.num_cached += chunk
        return torch.cat(states), torch.cat(drafted)


def reference_model(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def plain_drafts(whole, main, own, following, hidden, depth=0):
    """One draft layer in plain PyTorch, around transformers' decoder layer of the same number."""
    index = NUM_LAYERS + depth
    prefix = f"model.layers.{index}."
    embedding = own.get(prefix + "embed_tokens.weight", main.model.embed_tokens.weight)
    head = own.get(prefix + "shared_head.head.weight", main.lm_head.weight)
    size = (hidden.shape[-1],)
    eps = main.config.rms_norm_eps
    joined = torch.cat(
        (
            rms_norm(embedding[following], size, own[prefix + "enorm.weight"], eps),
            rms_norm(hidden, size, own[prefix + "hnorm.weight"], eps),
        ),
        dim=-1,
    )
    projected = (joined @ own[prefix + "eh_proj.weight"].T)[None]
    length = projected.shape[1]
    positions = torch.arange(length)[None]
    mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]
    rotation = main.model.rotary_emb(projected, positions)
    block = whole.model.layers[index]
    out = block(
        projected,
        attention_mask=mask,
        position_ids=positions,
        position_embeddings=rotation,
        use_cache=False,
    )
    out = (out[0] if isinstance(out, tuple) else out)[0]
    normed = rms_norm(out, size, own[prefix + "shared_head.norm.weight"], eps)
    return normed, normed @ head.T


def require_close(actual, expected):
    error = (actual - expected).abs().max() / expected.abs().max()
    assert error < 1e-4, error


@pytest.mark.parametrize("chunk_size", [64, 4])
@pytest.mark.parametrize(
    ("variant", "options"),
    [
        ("deepseek_v3", {}),
        ("deepseek_v3", {"has_own_head": True}),
        ("deepseek_v3", {"repeats_shared": False}),
        ("deepseek_v3_yarn_bias", {}),
        ("deepseek_v3_plain_queries", {}),
        ("glm4_moe", {}),
        ("glm4_moe", {"has_own_head": True}),
        ("glm4_moe_groups", {}),
        ("glm4_moe_lite", {}),
        ("glm_moe_dsa", {}),
    ],
    ids=str,
)
@torch.no_grad()
def test_drafts_are_those_of_plain_pytorch(tmp_path, variant, options, chunk_size):
    whole, own = write_draft_checkpoint(tmp_path, variant, **options)
    main = reference_model(tmp_path)
    runner = DraftRunner(load(tmp_path))
    following = [*PROMPT[1:], 23]
    hidden, drafted = runner.draft(runner.add(PROMPT), following, chunk_size=chunk_size)
    expected_hidden = main.model(torch.tensor([PROMPT])).last_hidden_state[0]
    require_close(hidden, expected_hidden)
    normed, logits = plain_drafts(whole, main, own, following, expected_hidden)
    require_close(drafted, normed)
    require_close(runner.drafts.compute_logits(drafted, 0), logits)


MTP_MODEL = getattr(transformers.modeling_layers, "MtpModel", None)


@pytest.mark.skipif(MTP_MODEL is None, reason="this transformers has no MtpModel")
@pytest.mark.parametrize("num_draft_layers", [1, 2])
@pytest.mark.parametrize("variant", ["deepseek_v3", "glm4_moe", "glm4_moe_groups"])
@torch.no_grad()
def test_drafts_are_those_of_transformers(tmp_path, variant, num_draft_layers):
    whole, own = write_draft_checkpoint(tmp_path, variant, num_draft_layers=num_draft_layers)
    main = reference_model(tmp_path)
    mtp = MTP_MODEL(main, num_draft_layers).eval()
    for depth, layer in enumerate(mtp.layers):
        prefix = f"model.layers.{NUM_LAYERS + depth}."
        layer.mtp_block.load_state_dict(whole.model.layers[NUM_LAYERS + depth].state_dict())
        layer.enorm.weight.copy_(own[prefix + "enorm.weight"])
        layer.hnorm.weight.copy_(own[prefix + "hnorm.weight"])
        layer.eh_proj.weight.copy_(own[prefix + "eh_proj.weight"])
        layer.post_norm.weight.copy_(own[prefix + "shared_head.norm.weight"])
    following = [*PROMPT[1:], 23]
    length = len(PROMPT)
    hidden = main.model(torch.tensor([PROMPT])).last_hidden_state
    tokens, logits, _ = mtp(
        torch.tensor([following]),
        hidden,
        attention_mask=None,
        position_ids=torch.arange(1, length + 1)[None],
        mtp_cache=transformers.cache_utils.MtpCache(config=main.config.get_mtp_config()),
    )
    runner, drafted = DraftRunner(load(tmp_path)), None
    for depth in range(num_draft_layers):
        drafted = runner.draft(
            runner.add(PROMPT), following, chunk_size=4, depth=depth, hidden=drafted
        )[1]
        guess = runner.drafts.compute_logits(drafted[-1:], depth)
        require_close(guess[0], logits[0, depth])
        assert int(guess.argmax()) == int(tokens[0, depth])
        following = [*following[1:], int(guess.argmax())]


def test_past_the_last_draft_layer_it_runs_again(tmp_path):
    write_draft_checkpoint(tmp_path)
    runner = DraftRunner(load(tmp_path))
    following = [*PROMPT[1:], 23]
    _, first = runner.draft(runner.add(PROMPT), following, chunk_size=64)
    _, fourth = runner.draft(runner.add(PROMPT), following, chunk_size=64, depth=3)
    assert torch.equal(first, fourth)


def test_embedding_and_head_are_kept_once_where_the_checkpoint_repeats_them(tmp_path):
    write_draft_checkpoint(tmp_path / "repeated")
    write_draft_checkpoint(tmp_path / "own", has_own_head=True)
    repeated, own = load(tmp_path / "repeated"), load(tmp_path / "own")
    shared = repeated.model.layers[-1]
    assert shared.embed_tokens is None
    assert shared.shared_head.head is None
    num_extra = sum(p.numel() for p in own.parameters()) - sum(
        p.numel() for p in repeated.parameters()
    )
    assert num_extra == own.model.embed_tokens.weight.numel() + own.lm_head.weight.numel()


def test_without_speculation_draft_layers_are_passed_over(tmp_path):
    write_draft_checkpoint(tmp_path)
    model = load_model(tmp_path, device=CPU, dtype=torch.float32)
    assert len(model.cache_specs()) == NUM_LAYERS
    with pytest.raises(ValueError, match="without draft layers"):
        DeepseekMTP(model)


def test_a_draft_layer_has_a_cache_after_the_model_s_own(tmp_path):
    write_draft_checkpoint(tmp_path, num_draft_layers=2)
    assert len(load(tmp_path).cache_specs()) == NUM_LAYERS + 2


def test_a_missing_tensor_of_a_draft_layer_is_named(tmp_path):
    write_draft_checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["num_nextn_predict_layers"] = 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"missing, the first is model\.layers\.3\."):
        load(tmp_path)


def test_an_unknown_tensor_of_a_draft_layer_is_named(tmp_path):
    write_draft_checkpoint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.2.fnorm.weight"] = torch.ones(3)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no tensor model\.layers\.2\.fnorm\.weight"):
        load(tmp_path)
    load_model(tmp_path, device=CPU, dtype=torch.float32)


@pytest.mark.parametrize(
    ("variant", "message"),
    [("deepseek_v3", "has no num_nextn_predict_layers"), ("llama", "the model is LlamaForCausal")],
)
def test_a_model_without_draft_layers_is_refused(tmp_path, variant, message):
    write_checkpoint(tmp_path, variant)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("num_nextn_predict_layers", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)


def test_random_weights_for_benchmarks_draft_too(tmp_path):
    write_draft_checkpoint(tmp_path)
    runner = DraftRunner(load(tmp_path, load_format="dummy"))
    _, drafted = runner.draft(runner.add(PROMPT), PROMPT, chunk_size=64)
    assert drafted.isfinite().all()
