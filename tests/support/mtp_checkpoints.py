"""Tiny random Qwen checkpoints with the draft layer under `mtp.`, as Qwen publishes them."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.support.random_checkpoints import write_checkpoint

LAYER_TYPES = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
NUM_LAYERS = len(LAYER_TYPES)


def write_mtp_checkpoint(folder: Path, variant: str, *, agreement: float = 0.0, **overrides):
    """Writes a checkpoint with one draft layer, which transformers passes over.

    Args:
        folder: where to.
        variant: of tests.support.random_checkpoints, one of Qwen's with states.
        agreement: how far attention and feed-forward parts shrink, and whether the draft layer
            passes on the token's embedding: model and draft then guess alike.
        overrides: of the config.

    Returns:
        transformers' model of all layers as if none of them drafted, and the draft layer's own
        tensors by name.
    """
    types = [*LAYER_TYPES, "full_attention"]
    whole = write_checkpoint(
        folder, variant, num_hidden_layers=NUM_LAYERS + 1, layer_types=types, **overrides
    )
    file = folder / "model.safetensors"
    last = f"model.layers.{NUM_LAYERS}."
    tensors = {
        name.replace(last, "mtp.layers.0."): tensor for name, tensor in load_file(file).items()
    }
    size = tensors["model.embed_tokens.weight"].shape[1]
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.empty(shape).normal_(0.0, 0.3, generator=generator)

    own = {
        "mtp.fc.weight": draw(size, 2 * size),
        "mtp.pre_fc_norm_embedding.weight": draw(size),
        "mtp.pre_fc_norm_hidden.weight": draw(size),
        "mtp.norm.weight": draw(size),
    }
    tensors |= own
    if agreement:
        _make_agreeable(tensors, agreement)
    save_file(tensors, file, metadata={"format": "pt"})
    config_file = folder / "config.json"
    config = json.loads(config_file.read_text())
    config |= {"num_hidden_layers": NUM_LAYERS, "layer_types": LAYER_TYPES}
    config_file.write_text(json.dumps(config))
    return whole, own


def add_draft_layer(folder: Path, target: Path) -> None:
    """Copies a checkpoint of Qwen3.5 that sees images, with a draft layer of random weights.

    Its attention and feed-forward parts are those of the first layer with attention.
    """
    shutil.copytree(folder, target)
    text = json.loads((folder / "config.json").read_text())["text_config"]
    prefix = f"model.language_model.layers.{text['layer_types'].index('full_attention')}."
    file = target / "model.safetensors"
    tensors = load_file(file)
    size = text["hidden_size"]
    generator = torch.Generator().manual_seed(1)
    tensors |= {
        name.replace(prefix, "mtp.layers.0."): tensor.clone()
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
    for name, shape in {
        "fc": (size, 2 * size),
        "pre_fc_norm_embedding": (size,),
        "pre_fc_norm_hidden": (size,),
        "norm": (size,),
    }.items():
        tensors[f"mtp.{name}.weight"] = torch.empty(shape).normal_(0.0, 0.3, generator=generator)
    save_file(tensors, file, metadata={"format": "pt"})


def _make_agreeable(tensors: dict[str, torch.Tensor], share: float) -> None:
    size = tensors["model.embed_tokens.weight"].shape[1]
    for name, tensor in tensors.items():
        if any(part in name for part in ("o_proj.", "down_proj", "out_proj.")):
            tensor *= 1 - share
    tensors["mtp.fc.weight"].zero_()[:, :size] = torch.eye(size)
    tensors["mtp.pre_fc_norm_embedding.weight"].zero_()  # norms add one
    tensors["mtp.norm.weight"].copy_(tensors["model.norm.weight"])
