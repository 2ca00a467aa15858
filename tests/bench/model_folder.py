"""Model folders without weights: a public model's shape for `--load-format dummy`.

python -m tests.bench.model_folder qwen3-8b /some/folder
"""

import argparse
import json
import shutil
from pathlib import Path

from services.engine.config.checkpoint import TINY_CHECKPOINT

SHAPES_FOLDER = Path(__file__).parent / "shapes"
TINY = "tiny"


def shape_names() -> list[str]:
    """Returns the shapes there are; tiny is the embedded model's."""
    return [TINY, *sorted(path.name for path in SHAPES_FOLDER.iterdir())]


def read_shape(name: str) -> dict:
    """Returns a shape's config.json.

    Raises:
        ValueError: there is no such shape.
    """
    if name not in shape_names():
        raise ValueError(f"there is no shape {name!r}; there are {', '.join(shape_names())}")
    folder = TINY_CHECKPOINT if name == TINY else SHAPES_FOLDER / name
    return json.loads((folder / "config.json").read_text())


def with_depth(config: dict, num_layers: int) -> dict:
    """Returns a config.json of fewer layers, those at the beginning; an encoder keeps its own.

    Raises:
        ValueError: the shape has fewer layers.
    """
    if "text_config" in config:
        return {**config, "text_config": with_depth(config["text_config"], num_layers)}
    depth = config["num_hidden_layers"]
    if not 0 < num_layers <= depth:
        raise ValueError(f"{num_layers} layers were asked for; the shape has {depth}")
    cut = {
        name: value[:num_layers]
        for name, value in config.items()
        if isinstance(value, list) and len(value) == depth
    }
    return {**config, **cut, "num_hidden_layers": num_layers}


def make_model_folder(name: str, parent: Path, num_layers: int | None = None) -> Path:
    """Writes the files that an engine needs to serve random weights of a shape; returns the folder.

    num_layers: only this many of the shape's layers; the width stays.

    The tokenizer is the embedded model's, with made-up words for the rest of the vocabulary, so
    that every token has a text. Sampling is greedy by default and no token ends a sequence but the
    model's own.
    """
    config = read_shape(name)
    if num_layers is not None:
        config = with_depth(config, num_layers)
    folder = parent / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    generation = {"do_sample": False, "eos_token_id": config["eos_token_id"]}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    shutil.copy(TINY_CHECKPOINT / "tokenizer_config.json", folder)
    tokenizer = json.loads((TINY_CHECKPOINT / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    for token_id in range(len(vocabulary), config["vocab_size"]):
        vocabulary[f"Ġw{token_id}"] = token_id
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def main() -> None:
    """Writes one folder and prints where it is."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("shape", choices=shape_names())
    parser.add_argument("folder", type=Path, help="gets a folder of the shape's name")
    arguments = parser.parse_args()
    print(make_model_folder(arguments.shape, arguments.folder))


if __name__ == "__main__":
    main()
