"""Checks that a small model can guess tokens for a model."""

import json
from pathlib import Path
from typing import Any

from models.config import ConfigError, ModelConfig
from models.config_sections.mixers import STATE
from models.eagle3_config import Eagle3Config, is_eagle3
from models.gemma4_assistant_config import AssistantConfig, is_assistant
from services.engine.checkpoint.model_files import ModelFolderError
from services.engine.checkpoint.model_folder import ModelFolder
from services.engine.checkpoint.tokenizer_files import TokenizerFiles


def check_draft_folder(folder: Path, model: ModelFolder, target: Path) -> None:
    """Checks a draft model's folder beside the model that is served.

    A folder without a tokenizer.json is taken to have the model's. Readers of the model's states
    or cache never need one.

    Args:
        folder: the draft model's.
        model: served.
        target: its folder.

    Raises:
        ModelFolderError: it cannot be read or served, or has another vocabulary, other tokens or
            fewer positions.
    """
    if not folder.is_dir():
        raise ModelFolderError(f"--draft-model is {folder}, which is not a folder")
    try:
        if _reads_the_model(folder, target):
            return
        config = ModelConfig.from_folder(folder)
    except ConfigError as error:
        raise ModelFolderError(f"--draft-model: {error}") from error
    if STATE in config.cache_windows:
        raise ModelFolderError(
            f"--draft-model {folder} is {config.architecture}, whose layers keep a state; a draft "
            "model must keep keys and values alone"
        )
    if config.vocab_size != model.vocab_size:
        raise ModelFolderError(
            f"--draft-model {folder} has a vocabulary of {config.vocab_size} tokens; "
            f"the model has {model.vocab_size}"
        )
    if config.max_position_embeddings < model.max_model_len:
        raise ModelFolderError(
            f"--draft-model {folder} has {config.max_position_embeddings} positions; "
            f"lower --max-model-len, which is {model.max_model_len}"
        )
    try:
        content = TokenizerFiles.from_folder(folder).content("tokenizer.json")
    except OSError as error:
        raise ModelFolderError(f"{error.filename} cannot be read: {error.strerror}") from error
    own = model.tokenizer.content("tokenizer.json")
    if content is None or own is None or content == own:
        return
    if _tokens(content, folder) != _tokens(own, folder):
        raise ModelFolderError(f"--draft-model {folder} has other tokens than the model")


def _reads_the_model(folder: Path, target: Path) -> bool:
    """Returns whether it is a head or an assistant, after checking that it fits the model.

    Both have the model's tokens, and rotations for as many positions as they need.

    Raises:
        ConfigError: it does not fit.
    """
    if is_assistant(folder):
        AssistantConfig.from_folder(folder, ModelConfig.from_folder(target))
    elif is_eagle3(folder):
        Eagle3Config.from_folder(folder, ModelConfig.from_folder(target))
    else:
        return False
    return True


def _tokens(content: bytes, folder: Path) -> Any:
    """Returns the vocabulary and the added tokens of a tokenizer.json."""
    try:
        parsed = json.loads(content)
        added = [(token["id"], token["content"]) for token in parsed.get("added_tokens") or ()]
        return parsed["model"]["vocab"], sorted(added)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ModelFolderError(f"{folder}/tokenizer.json cannot be read: {error!r}") from error
