"""A random checkpoint of EmbeddingGemma's form: Gemma 3 whose tokens see later ones."""

import json
from pathlib import Path

import torch
from transformers import Gemma3TextModel

from tests.support.pooled_engine import save_tensors, write_pooling
from tests.support.random_checkpoints import write_checkpoint

WINDOW = 9
"""In config.json, which counts both sides."""


def write_bidirectional(folder: Path) -> Gemma3TextModel:
    """Writes decoder, mean pooling and two linear layers; returns transformers' decoder."""
    model = write_checkpoint(folder, "gemma3")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config |= {
        "architectures": ["Gemma3TextModel"],
        "use_bidirectional_attention": True,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }
    path.write_text(json.dumps(config))
    save_tensors(model.model.state_dict(), folder / "model.safetensors")
    torch.manual_seed(3)
    dense = [
        (torch.randn(48, model.config.hidden_size), None, "linear.Identity"),
        (torch.randn(24, 48), None, "linear.Identity"),
    ]
    write_pooling(folder, "mean_tokens", is_normalized=True, dense=dense)
    return Gemma3TextModel.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def expected_vector(model: Gemma3TextModel, folder: Path, prompt: list[int]) -> torch.Tensor:
    """Returns the vector of a prompt by transformers and the formulas of sentence-transformers."""
    from safetensors.torch import load_file

    vector = model(torch.tensor([prompt])).last_hidden_state[0].mean(0)
    for name in ("2_Dense", "3_Dense"):
        vector = load_file(folder / name / "model.safetensors")["linear.weight"] @ vector
    return torch.nn.functional.normalize(vector, dim=0)
