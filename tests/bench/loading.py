"""Times loading a checkpoint against reading its files and against safetensors' own loading.

    python -m tests.bench.loading FOLDER [--device cuda] [--dtype bfloat16] [--repeat 3] [--json F]
    python -m tests.bench.loading FOLDER --make-gb 4     first writes a random Llama of 4 GB there

The first round finds the page cache as it was; later rounds find all that fits.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from models.loading.checkpoint import INDEX_FILE
from models.loading.loader import load_model

READ_BYTES = 16 * 2**20
SHARD_BYTES = 2**30
HIDDEN, INNER, VOCABULARY = 4096, 14336, 32000
LAYER_SHAPES = {
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (1024, HIDDEN),
    "self_attn.v_proj": (1024, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
NOISE_LEN = 2**20
"""Numbers drawn for a checkpoint; drawing all of them would take longer than reading them."""
LAYER_BYTES = 2 * sum(torch.Size(shape).numel() for shape in LAYER_SHAPES.values())


def make_checkpoint(folder: Path, gigabytes: float) -> None:
    """Writes a Llama in bfloat16 of about this size, in shards."""
    folder.mkdir(parents=True, exist_ok=True)
    num_layers = max(1, round((gigabytes * 1e9 - 4 * HIDDEN * VOCABULARY) / LAYER_BYTES))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "lm_head.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in range(num_layers):
        for name, shape in LAYER_SHAPES.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    write_weights(folder, shapes)


def write_weights(folder: Path, shapes: Mapping[str, Sequence[int]]) -> None:
    """Writes small random weights in bfloat16, in shards with their index."""
    weight_map: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    noise = 0.02 * torch.randn(NOISE_LEN, dtype=torch.bfloat16)
    for name, shape in shapes.items():
        repeats = -(-math.prod(shape) // NOISE_LEN)
        shard[name] = noise.repeat(repeats)[: math.prod(shape)].view(shape)
        is_full = sum(tensor.nbytes for tensor in shard.values()) > SHARD_BYTES
        if is_full or len(weight_map) + len(shard) == len(shapes):
            file = f"model-{len(weight_map):05}.safetensors"
            save_file(shard, folder / file)
            weight_map |= dict.fromkeys(shard, file)
            shard = {}
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


def read_files(files: list[Path]) -> None:
    """Reads every byte into one buffer."""
    buffer = bytearray(READ_BYTES)
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def load_plainly(files: list[Path], device: torch.device) -> None:
    """Loads one file after the other with safetensors and copies each tensor to the device."""
    for file in files:
        for tensor in load_file(file).values():
            tensor.to(device, copy=True)
    synchronize(device)


def synchronize(device: torch.device) -> None:
    """Waits for what is queued on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(call: Callable[[], object]) -> float:
    """Returns how long a call takes."""
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--make-gb", type=float)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.make_gb:
        make_checkpoint(options.folder, options.make_gb)
    # As in the worker: the loader has threads of its own.
    torch.set_num_threads(1)
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    files = sorted(options.folder.glob("*.safetensors"))
    num_bytes = sum(file.stat().st_size for file in files)

    def load() -> None:
        load_model(options.folder, device=device, dtype=dtype)
        synchronize(device)

    ways = {
        "octavo": load,
        "safetensors": lambda: load_plainly(files, device),
        "read": lambda: read_files(files),
    }
    rounds = []
    for _ in range(options.repeat):
        speeds = {name: num_bytes / seconds(way) / 1e6 for name, way in ways.items()}
        print(f"{num_bytes / 1e9:.2f} GB", {name: f"{v:.0f} MB/s" for name, v in speeds.items()})
        rounds.append(speeds)
    if options.json:
        report = {"bytes": num_bytes, "device": options.device, "mb_per_s": rounds}
        options.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
