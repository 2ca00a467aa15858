"""Damage to a checkpoint's folder, and the message that a loader must give for each kind."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from models.loading.checkpoint import INDEX_FILE, SINGLE_FILE

NORM = "model.norm.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
FP8_CONFIG = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@dataclass(frozen=True)
class Damage:
    """Damage to a sound folder, and parts of the message that must come of it."""

    apply: Callable[[Path], None]
    message: tuple[str, ...] = field(default=())


def copy_checkpoint(source: Path, target: Path) -> Path:
    """Copies the files of a checkpoint into a folder to damage."""
    for file in source.iterdir():
        if file.is_file():
            shutil.copyfile(file, target / file.name)
    return target


def split_in_two(folder: Path, *, index_changes: dict[str, Any] | None = None) -> None:
    """Replaces the single file by two and an index; a change to None takes a name out of it."""
    tensors = load_file(folder / SINGLE_FILE)
    names = sorted(tensors)
    halves = dict(zip(SHARDS, (names[::2], names[1::2]), strict=True))
    weight_map = {name: file for file, part in halves.items() for name in part}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map.update(index_changes or {})
    kept = {name: file for name, file in weight_map.items() if file is not None}
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": kept}))
    (folder / SINGLE_FILE).unlink()


def edit_tensors(**changes: torch.Tensor | None) -> Callable[[Path], None]:
    """Sets tensors, whose names have __ for a dot, or takes them out."""

    def apply(folder: Path) -> None:
        tensors = load_file(folder / SINGLE_FILE)
        for name, value in changes.items():
            tensors.pop(name.replace("__", "."), None)
            if value is not None:
                tensors[name.replace("__", ".")] = value
        save_file(tensors, folder / SINGLE_FILE)

    return apply


def spoil_values(
    name: str, spoil: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[Path], None]:
    """Replaces a tensor by something made of it."""

    def apply(folder: Path) -> None:
        tensors = load_file(folder / SINGLE_FILE)
        tensors[name] = spoil(tensors[name]).contiguous()
        save_file(tensors, folder / SINGLE_FILE)

    return apply


def edit_config(**changes: object) -> Callable[[Path], None]:
    """Sets fields of config.json."""

    def apply(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return apply


def edit_header(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Changes the header of the single file, and leaves the tensors as they are."""

    def apply(folder: Path) -> None:
        file = folder / SINGLE_FILE
        content = file.read_bytes()
        (length,) = struct.unpack_from("<Q", content)
        header = json.loads(content[8 : 8 + length])
        change(header)
        encoded = json.dumps(header).encode()
        file.write_bytes(struct.pack("<Q", len(encoded)) + encoded + content[8 + length :])

    return apply


def set_entry(name: str, **fields: object) -> Callable[[Path], None]:
    """Sets fields of one tensor's entry in the header."""
    return edit_header(lambda header: header[name].update(fields))


def truncate(num_bytes: int) -> Callable[[Path], None]:
    """Cuts the single file to `num_bytes`; a negative number cuts that many bytes off its end."""

    def apply(folder: Path) -> None:
        file = folder / SINGLE_FILE
        file.write_bytes(file.read_bytes()[:num_bytes])

    return apply


def write(name: str, content: bytes) -> Callable[[Path], None]:
    """Replaces a file's content."""
    return lambda folder: (folder / name).write_bytes(content) and None


def replace_by(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Takes a file away and makes something else in its place."""

    def apply(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return apply


def split_and(change: Callable[[Path], object]) -> Callable[[Path], None]:
    """Damages a checkpoint of two files."""

    def apply(folder: Path) -> None:
        split_in_two(folder)
        change(folder)

    return apply


def index_with(**changes: object) -> Callable[[Path], None]:
    """Makes two files whose index says something wrong of tensors."""
    renamed = {name.replace("__", "."): value for name, value in changes.items()}
    return lambda folder: split_in_two(folder, index_changes=renamed)


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


def _to_fp8(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float8_e4m3fn)


def _poke(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def spoil(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[3] = value
        return tensor

    return spoil


def _fp8_query(scale: torch.Tensor, **others: torch.Tensor) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        edit_config(quantization_config=FP8_CONFIG)(folder)
        spoil_values(QUERY, _to_fp8)(folder)
        edit_tensors(**{f"{QUERY}_scale_inv": scale}, **others)(folder)

    return apply


def _both(*changes: Callable[[Path], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        for change in changes:
            change(folder)

    return apply


def _shift_after(name: str, by: int) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        start, end = header[name]["data_offsets"]
        header[name]["data_offsets"] = [start + by, end + by]

    return change


HEADER_DAMAGES = {
    "zero-byte file": Damage(truncate(0), (SINGLE_FILE,)),
    "truncated length": Damage(truncate(5), (SINGLE_FILE,)),
    "truncated header": Damage(truncate(200), (SINGLE_FILE, "its header is")),
    "truncated data": Damage(truncate(-100), (SINGLE_FILE, "tensor model.", "ends at byte")),
    "bytes after the last tensor": Damage(
        lambda folder: (
            (folder / SINGLE_FILE).write_bytes((folder / SINGLE_FILE).read_bytes() + b"more")
            and None
        ),
        (SINGLE_FILE, "are no tensor's"),
    ),
    "header length beyond the file": Damage(
        write(SINGLE_FILE, struct.pack("<Q", 10**7) + b"{}"), (SINGLE_FILE, "10000000 bytes long")
    ),
    "header length beyond memory": Damage(
        write(SINGLE_FILE, struct.pack("<Q", 2**63) + b"{}"), (SINGLE_FILE, f"{2**63} bytes long")
    ),
    "header is not JSON": Damage(
        write(SINGLE_FILE, struct.pack("<Q", 7) + b"{nojson"), (SINGLE_FILE, "not JSON")
    ),
    "header is a list": Damage(
        write(SINGLE_FILE, struct.pack("<Q", 2) + b"[]"), (SINGLE_FILE, "not a JSON object")
    ),
    "header nested without end": Damage(
        write(SINGLE_FILE, struct.pack("<Q", 10**5) + b"[" * 10**5), (SINGLE_FILE, "not JSON")
    ),
    "a pickle with the name of a safetensors file": Damage(
        lambda folder: torch.save({NORM: torch.ones(2)}, folder / SINGLE_FILE), (SINGLE_FILE,)
    ),
    "overlapping offsets": Damage(
        edit_header(_shift_after(NORM, -8)), (SINGLE_FILE, "tensor ", "begins at byte")
    ),
    "offset past the end": Damage(
        edit_header(_shift_after(NORM, 10**9)), (SINGLE_FILE, f"tensor {NORM} ends at byte")
    ),
    "offsets backwards": Damage(
        set_entry(NORM, data_offsets=[8, 0]), (SINGLE_FILE, f"tensor {NORM}: its data_offsets")
    ),
    "negative shape": Damage(
        set_entry(NORM, shape=[-32]), (SINGLE_FILE, f"tensor {NORM}: its shape is [-32]")
    ),
    "shape that overflows": Damage(
        set_entry(NORM, shape=[2**62, 2**62]), (SINGLE_FILE, f"tensor {NORM}: its shape")
    ),
    "shape that is a word": Damage(
        set_entry(NORM, shape="large"), (SINGLE_FILE, f"tensor {NORM}: its shape is 'large'")
    ),
    "unknown dtype": Damage(
        set_entry(NORM, dtype="F99"), (SINGLE_FILE, f"tensor {NORM}: its dtype is 'F99'")
    ),
    "dtype of another size": Damage(
        set_entry(NORM, dtype="F64"), (SINGLE_FILE, f"tensor {NORM}: its shape")
    ),
    "dtype that torch has not": Damage(
        set_entry(NORM, dtype="F6_E2M3"), (SINGLE_FILE, f"tensor {NORM}: its dtype is 'F6_E2M3'")
    ),
    "integers for weights": Damage(
        set_entry(NORM, dtype="I32"), (SINGLE_FILE, f"tensor {NORM}: its dtype is int32")
    ),
}
FILE_DAMAGES = {
    "no weights": Damage(replace_by(SINGLE_FILE, lambda path: None), ("holds neither",)),
    "folder in place of the weights": Damage(
        replace_by(SINGLE_FILE, Path.mkdir), (SINGLE_FILE, "not a regular file")
    ),
    "weights that are a pipe": Damage(
        replace_by(SINGLE_FILE, os.mkfifo), (SINGLE_FILE, "not a regular file")
    ),
    "weights that link to themselves": Damage(
        replace_by(SINGLE_FILE, _loop), (SINGLE_FILE, "cannot be read")
    ),
    "weights that link to nothing": Damage(
        replace_by(SINGLE_FILE, lambda path: path.symlink_to("gone")), (SINGLE_FILE, "is missing")
    ),
    "missing shard": Damage(
        split_and(lambda folder: (folder / SHARDS[1]).unlink()), (SHARDS[1], "is missing")
    ),
    "folder in place of a shard": Damage(
        split_and(replace_by(SHARDS[0], Path.mkdir)), (SHARDS[0], "not a regular file")
    ),
    "empty shard": Damage(split_and(write(SHARDS[0], b"")), (SHARDS[0], "is damaged")),
    "shard without a tensor that the index promises": Damage(
        index_with(model__gone__weight=SHARDS[0]), (SHARDS[0], "model.gone.weight is missing")
    ),
    "index that leads out of the folder": Damage(
        index_with(**{QUERY: "../secret.safetensors"}), (INDEX_FILE, QUERY, "not a file name")
    ),
    "index with an absolute path": Damage(
        index_with(**{QUERY: "/etc/passwd"}), (INDEX_FILE, QUERY, "not a file name")
    ),
    "index that names the folder itself": Damage(
        index_with(**{QUERY: ""}), ("not a regular file",)
    ),
    "index that names the folder above": Damage(
        index_with(**{QUERY: ".."}), ("not a regular file",)
    ),
    "index that names no file": Damage(index_with(**{QUERY: 3}), (INDEX_FILE, QUERY, "3")),
    "index that leaves a tensor out": Damage(index_with(**{QUERY: None}), (QUERY, "missing")),
    "index is not JSON": Damage(split_and(write(INDEX_FILE, b"{")), (INDEX_FILE, "weight_map")),
    "index nested without end": Damage(
        split_and(write(INDEX_FILE, b"[" * 10**5)), (INDEX_FILE, "weight_map")
    ),
    "index without a map": Damage(split_and(write(INDEX_FILE, b"{}")), (INDEX_FILE, "weight_map")),
    "index whose map is a list": Damage(
        split_and(write(INDEX_FILE, b'{"weight_map": []}')), (INDEX_FILE, "weight_map")
    ),
    "index that is a folder": Damage(
        split_and(replace_by(INDEX_FILE, Path.mkdir)), (INDEX_FILE, "not a regular file")
    ),
}
TENSOR_DAMAGES = {
    "missing tensor": Damage(edit_tensors(**{QUERY: None}), (SINGLE_FILE, QUERY, "missing")),
    "extra tensor": Damage(
        edit_tensors(model__extra__weight=torch.ones(2)), (SINGLE_FILE, "model.extra.weight")
    ),
    "tensor under another layer's name": Damage(
        edit_tensors(model__layers__0__mlp__gate__weight=torch.ones(2, 2)), ("mlp.gate.weight",)
    ),
    "misshaped tensor": Damage(
        spoil_values(QUERY, lambda tensor: tensor[:-1]), (SINGLE_FILE, QUERY, "the model needs")
    ),
    "tensor with a dimension too many": Damage(
        spoil_values(QUERY, lambda tensor: tensor[None]), (SINGLE_FILE, QUERY, "the model needs")
    ),
    "scalar for a weight": Damage(
        spoil_values(NORM, lambda tensor: tensor[0]), (SINGLE_FILE, NORM, "the model needs")
    ),
    "not a number": Damage(
        spoil_values(QUERY, _poke(torch.nan)), (SINGLE_FILE, QUERY, "NaN or infinity")
    ),
    "infinity": Damage(
        spoil_values(QUERY, _poke(-torch.inf)), (SINGLE_FILE, QUERY, "NaN or infinity")
    ),
    "head that differs from the embedding it is tied to": Damage(
        _both(
            edit_config(tie_word_embeddings=True),
            spoil_values("lm_head.weight", lambda tensor: tensor + 1),
        ),
        (SINGLE_FILE, "lm_head.weight", "differs from model.embed_tokens.weight"),
    ),
    "FP8 that config.json does not mention": Damage(
        spoil_values(QUERY, _to_fp8), (SINGLE_FILE, QUERY, "no quantization_config")
    ),
    "FP8 without its scale": Damage(
        _both(edit_config(quantization_config=FP8_CONFIG), spoil_values(QUERY, _to_fp8)),
        (SINGLE_FILE, QUERY, "scale is missing"),
    ),
    "FP8 of the other kind": Damage(
        _both(
            edit_config(quantization_config=FP8_CONFIG),
            spoil_values(QUERY, lambda tensor: tensor.to(torch.float8_e5m2)),
        ),
        (SINGLE_FILE, QUERY, "float8_e5m2"),
    ),
    "FP8 with scales for other blocks": Damage(
        _fp8_query(torch.ones(7, 7)), (SINGLE_FILE, QUERY, "(7, 7)")
    ),
    "scale that is not a number": Damage(
        _fp8_query(torch.full((1, 1), torch.nan)), (SINGLE_FILE, QUERY, "NaN or infinity")
    ),
    "scale of a weight that is not FP8": Damage(
        _both(
            edit_config(quantization_config=FP8_CONFIG),
            edit_tensors(**{f"{QUERY}_scale_inv": torch.ones(1, 1)}),
        ),
        (SINGLE_FILE, f"{QUERY}_scale_inv"),
    ),
    "one scale under two names": Damage(
        _fp8_query(torch.ones(1, 1), **{f"{QUERY}_scale": torch.ones(1, 1)}),
        (SINGLE_FILE, f"{QUERY}_scale"),
    ),
}
CONFIG_DAMAGES = {
    "no config.json": Damage(
        replace_by("config.json", lambda path: None), ("config.json", "cannot be read")
    ),
    "config.json is not JSON": Damage(write("config.json", b"{"), ("config.json", "not JSON")),
    "config.json is not text": Damage(
        write("config.json", b"\xff\xfe\x00"), ("config.json", "not JSON")
    ),
    "config.json nested without end": Damage(
        write("config.json", b"[" * 10**5), ("config.json", "not JSON")
    ),
    "config.json is a list": Damage(write("config.json", b"[]"), ("config.json", "not an object")),
    "config.json is a folder": Damage(
        replace_by("config.json", Path.mkdir), ("config.json", "not a regular file")
    ),
    "config.json is a pipe": Damage(
        replace_by("config.json", os.mkfifo), ("config.json", "not a regular file")
    ),
    "field of the wrong type": Damage(
        edit_config(hidden_size="32"), ("config.json", "hidden_size is '32'")
    ),
    "negative size": Damage(
        edit_config(num_hidden_layers=-1), ("config.json", "num_hidden_layers is -1")
    ),
    "fewer layers than config.json says": Damage(
        edit_config(num_hidden_layers=7), ("model.layers.", "missing")
    ),
    "another hidden size than config.json says": Damage(
        edit_config(intermediate_size=40), ("model.layers.0.mlp", "the model needs")
    ),
    "unknown model": Damage(
        edit_config(architectures=["NoSuchForCausalLM"]), ("NoSuchForCausalLM", "no decoder")
    ),
    "unknown quantisation": Damage(
        edit_config(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
        ("config.json", "quantization_config.quant_method is 'bitsandbytes'"),
    ),
    "quantisation of the wrong type": Damage(
        edit_config(quantization_config="fp8"), ("config.json", "quantization_config is 'fp8'")
    ),
    "blocks without a size": Damage(
        edit_config(quantization_config={"quant_method": "fp8", "weight_block_size": [0, 128]}),
        ("config.json", "weight_block_size is [0, 128]"),
    ),
}
DAMAGES = HEADER_DAMAGES | FILE_DAMAGES | TENSOR_DAMAGES | CONFIG_DAMAGES
