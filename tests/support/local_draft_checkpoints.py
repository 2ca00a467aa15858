"""Tiny random checkpoints with a draft layer that has a window, as MiMo-V2 and DeepSeek V4 have."""

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.support.random_checkpoints import VARIANTS, write_checkpoint

NAMES = {"mimo_v2": "model.mtp.layers.0.", "deepseek_v4": "mtp.0."}
"""Family -> the beginning of the names of its draft layer's tensors."""


def write_local_draft_checkpoint(
    folder: Path, variant: str, *, agreement: float = 0.0, **overrides
):
    """Writes a checkpoint with one draft layer, which transformers passes over.

    Args:
        folder: where to.
        variant: of tests.support.random_checkpoints, of MiMo-V2 or DeepSeek V4.
        agreement: how far attention and feed-forward parts shrink, and whether the draft layer
            passes on the token's embedding: model and draft then guess alike.
        overrides: of the config.

    Returns:
        transformers' model of all layers as if none of them drafted, and the draft layer's own
        tensors by the rest of their names.
    """
    family = variant.removesuffix("_odd")
    is_hyper = family == "deepseek_v4"
    changes = VARIANTS[variant][2] | overrides
    num_layers = changes["num_hidden_layers"]
    types = {
        "layer_types": changes.get("layer_types", ["full_attention"] * num_layers),
        "mlp_layer_types": changes.get("mlp_layer_types", ["sparse"] * num_layers),
    }
    last = {"layer_types": "sliding_attention", "mlp_layer_types": "moe" if is_hyper else "dense"}
    whole = write_checkpoint(
        folder,
        variant,
        **overrides
        | {"num_hidden_layers": num_layers + 1}
        | {name: [*each, last[name]] for name, each in types.items()},
    )
    file = folder / "model.safetensors"
    pattern = rf"^(?:model\.)?layers\.{num_layers}\."
    norm = "pre_mlp_layernorm."
    tensors = {}
    for name, tensor in load_file(file).items():
        renamed = re.sub(pattern, NAMES[family], name)
        if renamed != name and not is_hyper:
            renamed = renamed.replace("post_attention_layernorm.", norm)
        tensors[renamed] = tensor
    own = _own_tensors(whole.config, is_hyper=is_hyper)
    if agreement:
        _make_agreeable(tensors, own, agreement)
    tensors |= {NAMES[family] + name: tensor for name, tensor in own.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    config_file = folder / "config.json"
    config = json.loads(config_file.read_text())
    config |= types | {"num_hidden_layers": num_layers}
    if is_hyper:
        config["num_nextn_predict_layers"] = 1
    config_file.write_text(json.dumps(config))
    return whole, own


def _own_tensors(config, *, is_hyper: bool) -> dict[str, torch.Tensor]:
    size = config.hidden_size
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int, center: float = 0.0) -> torch.Tensor:
        return torch.empty(shape).normal_(center, 0.3, generator=generator)

    own = {"enorm.weight": draw(size, center=1.0), "hnorm.weight": draw(size, center=1.0)}
    if not is_hyper:
        own["eh_proj.weight"] = draw(size, 2 * size)
        own["final_layernorm.weight"] = draw(size, center=1.0)
        return own
    streams = config.hc_mult
    return own | {
        "e_proj.weight": draw(size, size),
        "h_proj.weight": draw(size, size),
        "norm.weight": draw(size, center=1.0),
        "hc_head_fn": draw(streams, streams * size),
        "hc_head_base": draw(streams),
        "hc_head_scale": draw(1),
    }


def _make_agreeable(
    tensors: dict[str, torch.Tensor], own: dict[str, torch.Tensor], share: float
) -> None:
    size = len(own["enorm.weight"])
    for name, tensor in tensors.items():
        if any(part in name for part in ("o_proj.", "down_proj", "wo_b.", ".w2.")):
            tensor *= 1 - share
    own["enorm.weight"].fill_(1.0)
    norm = "norm.weight" if "norm.weight" in own else "final_layernorm.weight"
    own[norm].copy_(next(x for name, x in tensors.items() if re.match(r"(model\.)?norm\.w", name)))
    if "eh_proj.weight" in own:
        own["eh_proj.weight"].zero_()[:, :size] = torch.eye(size)
    else:
        own["e_proj.weight"].copy_(torch.eye(size))
        own["h_proj.weight"].zero_()
