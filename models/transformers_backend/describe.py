"""Prints the configuration of a model that runs as transformers' modules, as JSON.

`python -m models.transformers_backend.describe FOLDER`, for processes that never import torch.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from models.config import ConfigError
from models.transformers_backend.model import read_transformers_config


def main(folder: str) -> int:
    """Prints the configuration, or one line on standard error; returns the exit status."""
    try:
        config = read_transformers_config(Path(folder))
    except ConfigError as error:
        print(error, file=sys.stderr)  # noqa: T201  the answer
        return 1
    print(json.dumps(asdict(config)))  # noqa: T201  the answer
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
