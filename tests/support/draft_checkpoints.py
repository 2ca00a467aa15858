"""Tiny random DeepSeek checkpoints with draft layers, as DeepSeek publishes them."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.support.random_checkpoints import write_checkpoint

NUM_LAYERS = 2


def write_draft_checkpoint(
    folder: Path,
    variant: str = "deepseek_v3",
    *,
    num_draft_layers: int = 1,
    has_own_head: bool = False,
    repeats_shared: bool = True,
    agreement: float = 0.0,
    **overrides,
):
    """Writes a checkpoint whose last layers draft.

    Args:
        folder: where to.
        variant: of tests.support.random_checkpoints, one of DeepSeek's.
        num_draft_layers: layers that follow the model's NUM_LAYERS.
        has_own_head: whether the draft layers' embedding and head differ from the model's.
        repeats_shared: whether the files hold embedding and head again where they do not differ.
        agreement: how far model and draft agree; the `share` of `make_agreeable`.
        overrides: of the config.

    Returns:
        transformers' model of all layers as if none of them drafted, and the draft layers' own
        tensors by name.
    """
    whole = write_checkpoint(
        folder, variant, num_hidden_layers=NUM_LAYERS + num_draft_layers, **overrides
    )
    file = folder / "model.safetensors"
    stored = load_file(file)
    generator = torch.Generator().manual_seed(num_draft_layers)
    own = {}
    embedding = stored["model.embed_tokens.weight"]
    head = stored.get("lm_head.weight", embedding)
    size = embedding.shape[1]

    def draw(*shape: int, center: float = 0.0) -> torch.Tensor:
        return torch.empty(shape).normal_(center, 0.3, generator=generator)

    for index in range(NUM_LAYERS, NUM_LAYERS + num_draft_layers):
        prefix = f"model.layers.{index}."
        own |= {
            prefix + "enorm.weight": draw(size, center=1.0),
            prefix + "hnorm.weight": draw(size, center=1.0),
            prefix + "eh_proj.weight": draw(size, 2 * size),
            prefix + "shared_head.norm.weight": draw(size, center=1.0),
        }
        if has_own_head:
            own[prefix + "embed_tokens.weight"] = draw(*embedding.shape)
            own[prefix + "shared_head.head.weight"] = draw(*head.shape)
        elif repeats_shared:
            own[prefix + "embed_tokens.weight"] = embedding.clone()
            own[prefix + "shared_head.head.weight"] = head.clone()
    tensors = {**stored, **own}
    if agreement:
        make_agreeable(tensors, agreement)
    save_file(tensors, file, metadata={"format": "pt"})
    config_file = folder / "config.json"
    config = json.loads(config_file.read_text())
    for name in ("layer_types", "mlp_layer_types", "indexer_types"):
        if config.get(name):
            config[name] = config[name][:NUM_LAYERS]
    config |= {
        "num_hidden_layers": NUM_LAYERS,
        "num_nextn_predict_layers": num_draft_layers,
    }
    config_file.write_text(json.dumps(config))
    return whole, own


def make_agreeable(tensors: dict[str, torch.Tensor], share: float) -> None:
    """Changes a checkpoint so that the next token depends mostly on the last one.

    All attention and feed-forward outputs shrink by `1 - share`, in the draft layers too, and a
    draft layer's projection passes the token's embedding on and nothing else: both then map a
    token to about the same successor.
    """
    size = tensors["model.embed_tokens.weight"].shape[1]
    final_norm = tensors["model.norm.weight"]
    for name, tensor in tensors.items():
        if "o_proj.weight" in name or "down_proj.weight" in name:
            tensor *= 1 - share
        elif name.endswith("eh_proj.weight"):
            tensor.zero_()
            tensor[:, :size] = torch.eye(size)
        elif name.endswith("enorm.weight"):
            tensor.fill_(1.0)
        elif name.endswith("shared_head.norm.weight"):
            tensor.copy_(final_norm)
