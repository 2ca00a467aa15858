"""Draft layers and heads see images as the model does: vectors, and positions in three axes."""

from dataclasses import replace

import pytest
import torch

from models.deepseek_mtp import DeepseekMTP, append_draft_layers
from models.eagle3 import Eagle3
from models.forward_context import ImageMetadata, forward_context
from models.layers.decoder import CausalLM
from models.loading.eagle3 import load_eagle3
from models.loading.loader import load_model
from models.parallel.group import SINGLE
from tests.support.eagle3_checkpoints import write_eagle3_head
from tests.support.paged_runner import PagedRunner
from tests.support.vision_variants import write_vision_checkpoint

TOKENS = [5, 17, 3, 44, 2, 9, 8, 31, 60]
IMAGE = slice(2, 6)
POSITIONS = torch.tensor(
    [[0, 1, 2, 2, 2, 2, 4, 5, 6], [0, 1, 2, 2, 3, 3, 4, 5, 6], [0, 1, 2, 3, 2, 3, 4, 5, 6]]
)


@pytest.fixture
def model(tmp_path) -> CausalLM:
    write_vision_checkpoint(tmp_path, "qwen3_5")
    model = load_model(tmp_path, device=torch.device("cpu"), dtype=torch.float32, sees_images=True)
    model.config = replace(model.config, num_draft_layers=1)
    append_draft_layers(model, SINGLE)
    draft = model.model.layers[-1]
    draft.embed_tokens = draft.shared_head.head = None
    generator = torch.Generator().manual_seed(0)
    for param in draft.parameters():
        param.data.normal_(0.0, 0.3, generator=generator)
    return model.eval()


@pytest.fixture
def seeing(tmp_path) -> CausalLM:
    write_vision_checkpoint(tmp_path, "qwen3_vl")
    return load_model(tmp_path, device=torch.device("cpu"), dtype=torch.float32, sees_images=True)


def head_of(model, folder, target, **overrides):
    config = model.config
    overrides |= {
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
    }
    write_eagle3_head(folder, target, agrees=False, **overrides)
    head = load_eagle3(
        folder, model, device=torch.device("cpu"), dtype=torch.float32, max_positions=64
    )
    return Eagle3(head)


def drafted(model, rows=None, positions=None, step=None):
    """Returns the drafts' states for successors TOKENS, those of IMAGE with vectors."""
    runner = PagedRunner(model)
    sequence = runner.add(TOKENS)
    runner._grow(sequence, len(TOKENS))
    _, context = runner.prepare([(sequence, len(TOKENS))])
    index = torch.full((len(TOKENS),), -1, dtype=torch.int32)
    index[IMAGE] = torch.arange(4, dtype=torch.int32)
    metadata = ImageMetadata(
        rows=torch.empty(0, 32) if rows is None else rows,
        index=None if rows is None else index,
        rope_positions=positions,
    )
    step = step or DeepseekMTP(model)
    width = 32 if isinstance(step, DeepseekMTP) else 4 * 32
    hidden = torch.randn(len(TOKENS), width, generator=torch.Generator().manual_seed(1))
    with forward_context(replace(context, image_metadata=metadata)), torch.inference_mode():
        return step(torch.tensor(TOKENS), context.context.positions, hidden, 0)


def test_vectors_of_images_replace_the_embeddings_of_their_tokens(model):
    rows = torch.randn(4, 32, generator=torch.Generator().manual_seed(2))
    found = drafted(model, rows)
    assert not torch.equal(found, drafted(model))
    model.model.embed_tokens.weight.data[TOKENS[IMAGE]] = rows
    assert torch.equal(found, drafted(model))


def test_drafts_are_rotated_by_positions_in_three_axes(model):
    plain = torch.arange(len(TOKENS)).expand(3, -1)
    assert torch.equal(drafted(model, positions=plain), drafted(model))
    assert not torch.equal(drafted(model, positions=POSITIONS), drafted(model))


def test_a_head_sees_the_vectors_of_images(seeing, tmp_path):
    step = head_of(seeing, tmp_path / "head", tmp_path)
    rows = torch.randn(4, 32, generator=torch.Generator().manual_seed(2))
    found = drafted(seeing, rows, step=step)
    assert not torch.equal(found, drafted(seeing, step=step))
    seeing.model.embed_tokens.weight.data[TOKENS[IMAGE]] = rows
    assert torch.equal(found, drafted(seeing, step=step))


def test_a_head_has_the_axes_of_its_own_configuration(seeing, tmp_path):
    plain = head_of(seeing, tmp_path / "plain", tmp_path)
    scaling = {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    axes = head_of(seeing, tmp_path / "axes", tmp_path, rope_scaling=scaling)
    expected = drafted(seeing, step=plain)
    assert torch.equal(drafted(seeing, positions=POSITIONS, step=plain), expected)
    assert not torch.equal(drafted(seeing, positions=POSITIONS, step=axes), expected)
    straight = torch.arange(len(TOKENS)).expand(3, -1)
    assert torch.equal(drafted(seeing, positions=straight, step=axes), expected)
