"""The tiny model with its vocabulary as ranks, as Kimi's checkpoints have theirs."""

import base64
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from models.tokenizers.byte_ranks import spelled
from services.engine.config.checkpoint import TINY_CHECKPOINT


def write_tiktoken_folder(folder: Path, renamed: Mapping[int, str] | None = None) -> Path:
    """Copies the embedded model without tokenizer.json; renamed: other words of some tokens."""
    shutil.copytree(TINY_CHECKPOINT, folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").unlink()
    special = {each["content"]: each["id"] for each in content["added_tokens"]}
    octets = {spelled(bytes([byte])): byte for byte in range(256)}
    lines = []
    for text, rank in content["model"]["vocab"].items():
        if text not in special:
            word = (renamed or {}).get(rank, text)
            token = base64.b64encode(bytes(octets[each] for each in word))
            lines.append(b"%s %d\n" % (token, rank))
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] = {
        str(token_id): {"content": text, "special": True} for text, token_id in special.items()
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
