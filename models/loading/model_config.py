"""Reads the configuration of a checkpoint for the modules that will run it."""

from pathlib import Path

from models.config import ModelConfig, ModelImpl, decoder_class, runs_own_modules


def read_model_config(
    folder: Path, model_impl: ModelImpl, *, sees_images: bool = False
) -> ModelConfig:
    """Reads `folder`/config.json.

    Args:
        folder: the checkpoint.
        model_impl: whose modules run.
        sees_images: whether the encoder of images is read, if our modules have one.

    Raises:
        ConfigError: the file is missing or wrong, or these modules do not serve the model.
    """
    architecture = decoder_class(folder)
    if runs_own_modules(architecture, model_impl):
        return ModelConfig.from_folder(folder, sees_images=sees_images)
    # Takes seconds to import, and most models do not need it.
    from models.transformers_backend.model import read_transformers_config

    return read_transformers_config(folder)
