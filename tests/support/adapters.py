"""Random adapters in PEFT's format, and models with their weights merged."""

import copy
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from models.layers.adapter_room import fill_slot, make_room
from models.layers.decoder import CausalLM
from models.loading.adapter import AdapterReader
from models.loading.loader import load_model
from services.engine.config.checkpoint import TINY_CHECKPOINT

Factors = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""Module -> A [r, K] and B [N, r]."""

EMBEDDING = "model.embed_tokens"
WEIGHTS = "model.safetensors"
FLOAT32 = {"device": torch.device("cpu"), "dtype": torch.float32}


def random_factors(modules, *, rank=4, seed=0, size=0.3) -> Factors:
    """Returns factors of modules, given with the shapes of their weights."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator) * size

    return {name: (draw(rank, k), draw(n, rank)) for name, (n, k) in modules.items()}


def tiny_factors(seed: int) -> Factors:
    """Returns factors of all projections of the embedded model."""
    modules = {
        name.removesuffix(".weight"): tuple(tensor.shape)
        for name, tensor in load_file(TINY_CHECKPOINT / WEIGHTS).items()
        if name.endswith("proj.weight")
    }
    return random_factors(modules, seed=seed, size=0.05)


def linear_modules(model, *, without=()) -> dict[str, tuple[int, int]]:
    """Returns the linear layers of a model of transformers, with the shapes of their weights."""
    return {
        name: tuple(module.weight.shape)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and not name.endswith(tuple(without))
    }


def expert_factors(model, *, rank=4, seed=0, size=0.3) -> Factors:
    """Returns factors of a model's stacked experts as PEFT has them: A [E * r, K], B [N, r * E]."""
    factors = {}
    for name, (module, param) in _stacked_experts(model).items():
        count, n, k = _rows_first(module, param).shape
        shapes = {name: (n, k)}
        drawn = random_factors(shapes, rank=rank * count, seed=seed + len(factors), size=size)
        factors |= drawn
    return factors


def single_expert_factors(stacked: Factors, num_experts, names) -> Factors:
    """Returns stacked factors as those of single experts; names: of gate, up and down."""
    factors = {}
    for name, (a, b) in stacked.items():
        experts, _, parameter = name.rpartition(".")
        for expert in range(num_experts):
            own_a = a.view(num_experts, -1, a.shape[1])[expert]
            own_b = b.view(len(b), -1, num_experts)[..., expert]
            if parameter == "down_proj":
                factors[f"{experts}.{expert}.{names[2]}"] = own_a, own_b
                continue
            for part, own in enumerate(own_b.chunk(2)):
                factors[f"{experts}.{expert}.{names[part]}"] = own_a, own
    return factors


def _stacked_experts(model):
    """Returns the parameters of a model of transformers that stack experts, and their modules."""
    return {
        f"{path}.{name}": (module, param)
        for path, module in model.named_modules()
        if path.endswith(".experts")
        for name, param in module.named_parameters(recurse=False)
        if param.dim() == 3
    }


def _rows_first(module, param):
    """Returns stacked weights as [E, N, K]."""
    return param.transpose(1, 2) if getattr(module, "is_transposed", False) else param


def vocabulary_factors(model, *, rank=4, seed=0, size=0.3) -> Factors:
    """Returns factors of the embedding and the head of a model of transformers."""
    vocab, hidden = model.get_input_embeddings().weight.shape
    head = random_factors({"lm_head": (vocab, hidden)}, rank=rank, seed=seed, size=size)
    table = random_factors({EMBEDDING: (hidden, vocab)}, rank=rank, seed=seed + 1, size=size)
    return head | table


def write_adapter(folder: Path, factors: Factors, *, rank=4, alpha=8, **config) -> Path:
    """Writes an adapter as PEFT does."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for module, (a, b) in factors.items():
        if module == EMBEDDING:
            tensors[f"base_model.model.{module}.lora_embedding_A"] = a.contiguous()
            tensors[f"base_model.model.{module}.lora_embedding_B"] = b.contiguous()
            continue
        experts, _, parameter = module.rpartition(".")
        if experts.endswith(".experts"):
            is_wrapped = f"{experts}.down_proj" in factors and parameter != "down_proj"
            module = f"{experts}.base_layer" if is_wrapped else experts
        tensors[f"base_model.model.{module}.lora_A.weight"] = a.clone()
        tensors[f"base_model.model.{module}.lora_B.weight"] = b.clone()
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none", **config}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder


def merged_model(model, factors: Factors, *, scale=2.0):
    """Returns a model of transformers with an adapter merged: W + scale * B A."""
    merged = copy.deepcopy(model)
    stacked = _stacked_experts(merged)
    with torch.no_grad():
        for module, (a, b) in factors.items():
            if module in stacked:
                weight = _rows_first(*stacked[module])
                by_expert = b.view(len(b), -1, len(weight)).permute(2, 0, 1)
                weight += scale * (by_expert @ a.view(len(weight), -1, a.shape[1]))
                continue
            delta = scale * (b @ a)
            merged.get_submodule(module).weight += delta.T if module == EMBEDDING else delta
    return merged


def write_merged(folder: Path, model, factors: Factors, *, scale=2.0) -> Path:
    """Writes a checkpoint of a model of transformers with an adapter merged."""
    merged_model(model, factors, scale=scale).save_pretrained(folder)
    return folder


def load_with_adapters(
    base: Path, *adapters: Path, max_rank=8, with_embeddings=False, with_experts=False, **options
) -> CausalLM:
    """Loads a model with adapters in its slots, in order."""
    model = load_model(base, **{**FLOAT32, **options})
    make_room(
        model,
        num_slots=len(adapters),
        max_rank=max_rank,
        with_embeddings=with_embeddings,
        with_experts=with_experts,
    )
    reader = AdapterReader(model)
    for slot, folder in enumerate(adapters):
        for share in reader.read(folder).layers:
            fill_slot(share, slot)
    return model


def write_merged_files(folder: Path, base: Path, factors: Factors, *, scale=2.0) -> Path:
    """Writes a copy of a checkpoint of one file with an adapter merged, in float32."""
    shutil.copytree(base, folder)
    tensors = {name: each.float() for name, each in load_file(base / WEIGHTS).items()}
    for module, (a, b) in factors.items():
        tensors[f"{module}.weight"] += scale * (b @ a)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder
