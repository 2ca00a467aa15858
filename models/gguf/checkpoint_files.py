"""The JSON files of a Hugging Face checkpoint, made out of a GGUF model's metadata."""

import json

from models.gguf.config import model_config
from models.gguf.metadata import Metadata
from models.gguf.model import GgufModel
from models.gguf.tokenizer import GgufTokenizer, generation_config


def checkpoint_files(model: GgufModel) -> dict[str, bytes]:
    """Returns the contents of files by their names.

    Raises:
        GgufError: something is missing, ill-typed or not supported.
    """
    tokenizer = GgufTokenizer.read(model)
    values = {
        "config.json": {**model_config(Metadata(model)), "eos_token_id": tokenizer.end_ids()},
        "generation_config.json": generation_config(tokenizer),
        "tokenizer.json": tokenizer.tokenizer_json(),
        "tokenizer_config.json": tokenizer.config_json(),
    }
    return {name: json.dumps(value).encode() for name, value in values.items()}
