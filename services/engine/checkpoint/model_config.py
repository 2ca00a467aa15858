"""Reads a model's configuration in the service process, which never imports torch."""

import os
import subprocess
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from models.config import (
    CONFIG_FILE,
    ConfigError,
    ModelConfig,
    ModelImpl,
    decoder_class,
    runs_own_modules,
)
from services.engine.config.checkpoint import REPOSITORY
from services.processes.child import python_command
from services.settings.installation import MissingExtraError, require_extras

_PROGRAM = "models.transformers_backend.describe"
_TIME_LIMIT_S = 120.0
"""For importing transformers from a cold disk and building a network without memory."""


def read_model_config(
    folder: Path, model_impl: ModelImpl, *, sees_images: bool = False
) -> ModelConfig:
    """Reads `folder`/config.json for the modules that will run the model.

    A process of its own imports transformers.

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
    try:
        require_extras("transformers")
    except MissingExtraError as error:
        raise ConfigError(f"{architecture} runs as modules of transformers: {error}") from error
    try:
        done = subprocess.run(
            python_command(_PROGRAM, [str(folder.absolute())]),
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIME_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"{folder / CONFIG_FILE}: transformers took more than {_TIME_LIMIT_S:.0f} s to build "
            f"{architecture}"
        ) from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise ConfigError(lines[-1])
    try:
        return TypeAdapter(ModelConfig).validate_json(done.stdout)
    except ValidationError as error:
        raise ConfigError(f"{folder / CONFIG_FILE}: {_PROGRAM} answered {error}") from error
