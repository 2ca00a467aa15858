"""Refuses models that data-parallel ranks cannot share."""

from models.config import ModelConfig


def check_data_parallel(model: ModelConfig, size: int) -> None:
    """Refuses a model whose ranks would have nothing to share.

    Raises:
        ValueError: it names the model's family, and what to do instead.
    """
    if size == 1:
        return
    name = model.architecture
    if model.transformers is not None:
        raise ValueError(
            f"--data-parallel-size {size} does not cover transformers' modules, which run {name}"
        )
    if model.moe is None:
        raise ValueError(
            f"--data-parallel-size {size} needs a model with experts, and {name} has none: "
            f"`octavo serve --engines {size}` runs independent engines"
        )
