"""Finds the parameter of each checkpoint tensor."""

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from models.layers.decoder import CausalLM
from models.layers.pipeline import PPMissingLayer
from models.layers.weight import LoadsWeights, Replicated, ShardId, StackedExperts

COMMON_RENAMES = {"weight_scale_inv": "weight_scale"}
"""DeepSeek calls the factor of weights an inverse scale."""

TEXT_PREFIXES = {
    "language_model.model.blocks.": "model.layers.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
"""Start of a name in a model of several parts -> in its text part. transformers 4.52 changed it,
and 5.24 writes the layers of Kimi K2.5 as blocks.
"""
_TEXT = (
    "model.embed_tokens.",
    "model.embed_tokens_per_layer.",
    "model.per_layer_",
    "model.layers.",
    "model.norm.",
    "lm_head.",
)

VISION_PARTS = (
    "vision_tower.",
    "vit.",
    "vision_embedder.",
    "embed_vision.",
    "mm_projector.",
    "multi_modal_projector.",
    "patch_merge_mlp.",
    "image_newline",
)
"""Parts of an encoder of images in families that do not call it `visual`."""

REPEATED_IN_DRAFT_LAYERS = (".embed_tokens.weight", ".shared_head.head.weight")
"""Tensors that checkpoints store again with every draft layer."""

WEIGHT_PARTS = ("_scale", "_zero", "_order")
"""Ends of the names of parameters without which a kept weight has no meaning."""

_LAYER_NUMBER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Destination:
    """Where one checkpoint tensor goes."""

    layer: LoadsWeights
    param: nn.Parameter
    shard_id: ShardId


def find_destinations(model: CausalLM) -> dict[str, Destination]:
    """Returns where each tensor goes, by its name in the checkpoint after `renamed`."""
    destinations = {}
    experts = _expert_tensors_by_parameter(model)
    for path, layer in model.stored_module.named_modules():
        if path.partition(".")[0] == "pooling":  # it has files of its own
            continue
        for param_name, param in layer.named_parameters(recurse=False):
            own_name = ".".join(filter(None, (path, param_name)))
            names = list(_checkpoint_names(model, path, param_name, own_name, experts))
            loader = layer if isinstance(layer, LoadsWeights) else _loader_of(names)
            for name, shard_id in names:
                if name not in model.tied_weights:
                    destinations[name] = Destination(loader, param, shard_id)
    return destinations


def torn(missing: Collection[str], destinations: Collection[str]) -> set[str]:
    """Returns the missing tensors of weights of which another part is stored."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in destinations:
        weight = next((name.removesuffix(e) for e in WEIGHT_PARTS if name.endswith(e)), name)
        groups[weight].append(name)
    absent = set(missing)
    stored = [name for group in groups.values() if not absent.issuperset(group) for name in group]
    return absent.intersection(stored)


def _loader_of(names: Sequence[tuple[str, ShardId]]) -> LoadsWeights:
    """Returns the loader of a parameter whose layer has none."""
    parts = {shard_id[1] for _, shard_id in names if isinstance(shard_id, tuple)}
    return StackedExperts(len(parts)) if parts else Replicated()


def stored_modules(model: CausalLM, path: str) -> list[str]:
    """Returns the checkpoint's modules that our module at `path` packs, by shard id."""
    parent, _, own_name = path.rpartition(".")
    packed = model.packed_modules_mapping.get(own_name, (own_name,))
    return [".".join(filter(None, (parent, name))) for name in packed]


def merged_parts(name: str, model: CausalLM) -> list[str]:
    """Returns the names of gate and up that a merged weight holds, if the family's are apart.

    name: of a stored weight, after `renamed`. transformers merges both in classes whose released
    names it converts.

    Returns:
        Gate, then up; none of any other weight.
    """
    parts = model.packed_modules_mapping.get("gate_up_proj", ())
    end = "gate_up_proj.weight"
    if len(parts) != 2 or not name.endswith(f".{end}"):
        return []
    return [f"{name.removesuffix(end)}{part}.weight" for part in parts]


def renamed(name: str, model: CausalLM) -> str:
    """Returns a stored tensor's name as the model family writes it."""
    for stored, ours in COMMON_RENAMES.items():
        name = name.replace(stored, ours)
    own_name = None if model.visual is None else _vision_name(name)
    if model.visual is not None and own_name is not None:
        return f"visual.{model.visual.renamed(own_name)}"
    for stored, ours in TEXT_PREFIXES.items() if model.config.is_text_part else ():
        if name.startswith(stored):
            name = ours + name.removeprefix(stored)
    return model.renamed(name)


def _vision_name(name: str) -> str | None:
    """Returns a tensor's name within the encoder of images; None of another part.

    Releases of transformers before 4.52 put no `model.` before it.
    """
    name = name.removeprefix("model.")
    if name.startswith("visual."):
        return name.removeprefix("visual.")
    return name if name.startswith(VISION_PARTS) else None


def is_of_loaded_part(name: str, model: CausalLM) -> bool:
    """Returns whether a tensor, by its name after `renamed`, is of a part of several that loads."""
    own_name = name.removeprefix("visual.")
    if model.visual is None or own_name == name:
        return name.startswith(_TEXT)
    return not own_name.startswith(model.visual.unused_parts)


def is_past_the_last_layer(name: str, model: CausalLM) -> bool:
    """Returns whether a tensor belongs to a draft layer and the model does not use it."""
    match = _LAYER_NUMBER.search(name)
    if match is None:
        return False
    is_draft = int(match[1]) >= model.config.num_hidden_layers
    is_loaded = int(match[1]) < model.num_loaded_layers
    return is_draft and (not is_loaded or name.endswith(REPEATED_IN_DRAFT_LAYERS))


def is_of_another_stage(name: str, model: CausalLM) -> bool:
    """Returns whether a tensor belongs to a module that another pipeline stage has."""
    module: nn.Module | None = model.stored_module
    for part in name.split("."):
        module = None if module is None else module._modules.get(part)
        if isinstance(module, PPMissingLayer):
            return True
    return False


def _expert_tensors_by_parameter(model: CausalLM) -> dict[str, list[tuple[str, ShardId]]]:
    tensors: dict[str, list[tuple[str, ShardId]]] = {}
    for parameter, checkpoint_name, expert_id, part in model.expert_tensors:
        tensors.setdefault(parameter, []).append((checkpoint_name, (expert_id, part)))
    return tensors


def _checkpoint_names(
    model: CausalLM,
    path: str,
    param_name: str,
    own_name: str,
    experts: dict[str, list[tuple[str, ShardId]]],
) -> Iterator[tuple[str, ShardId]]:
    """Yields the names and shard ids of the checkpoint tensors that fill one parameter."""
    for parameter, tensors in experts.items():
        match = re.search(rf"(?:^|\.){re.escape(parameter)}((?:_scale)?)$", own_name)
        if match:
            prefix = own_name[: match.start()]
            for checkpoint_name, shard_id in tensors:
                yield ".".join(filter(None, (prefix, checkpoint_name + match[1]))), shard_id
            return
    parent, _, module_name = path.rpartition(".")
    for shard_id, packed in enumerate(
        model.packed_modules_mapping.get(module_name, (module_name,))
    ):
        yield ".".join(filter(None, (parent, packed, param_name))), shard_id
