"""Replaces a model's name on the hub, or a GGUF file, by the folder that has its files."""

import time
from typing import TypeVar

import structlog

from models.config_sections.fields import ConfigError
from models.config_sections.pooling import answers_of, needs_answers
from services.engine.checkpoint.gguf_model import gguf_files, made_folder
from services.engine.checkpoint.model_files import ModelFolderError
from services.engine.checkpoint.tokenizer_files import TokenizerFiles
from services.engine.config.engine_config import EngineConfig
from services.hub.gguf_files import model_name
from services.hub.names import HubName, hub_name
from services.hub.packaged import packaged_model

log = structlog.get_logger()

LOG_INTERVAL_S = 5.0
_TOKENIZER = "tokenizer.json"
_GGUF_FOLDERS = "gguf"
"""Where in the folder of compiled code the made folders are: workers trust what it has."""

_Config = TypeVar("_Config", bound=EngineConfig)


def with_local_model(config: _Config, *, has_weights: bool = True) -> _Config:
    """Returns the configuration with a folder for `model`, after fetching what the folder lacks.

    Tokens of answers are those of the folder's tokenizer, which workers cannot make.

    Args:
        config: its model is a folder, a GGUF file or a name on the hub.
        has_weights: whether weights are fetched as well.

    Raises:
        HubError: the model cannot be fetched, or it is not clear which file is meant.
        ModelFolderError: a GGUF file is damaged or not supported.
    """
    packaged = packaged_model(config.checkpoint.model)
    name = hub_name(config.checkpoint.model)
    if packaged is not None:
        served_name = config.checkpoint.served_model_name or str(config.checkpoint.model)
        config = config.with_flags(model=packaged, served_model_name=served_name)
    elif name is not None:
        config = _fetched(config, name, has_weights=has_weights)
    return _with_answers(_with_gguf(config))


def _with_gguf(config: _Config) -> _Config:
    """Returns the configuration with the folder that is made of a GGUF model, if it is one."""
    files = gguf_files(config.checkpoint.model, config.checkpoint.gguf_file)
    if not files:
        return config
    served_name = config.checkpoint.served_model_name or model_name(files[0].name)
    folder = made_folder(files, config.compilation.code_dir / _GGUF_FOLDERS)
    log.info("gguf_opened", file=str(files[0]), num_files=len(files), folder=str(folder))
    return config.with_flags(model=folder, served_model_name=served_name)


def _with_answers(config: _Config) -> _Config:
    """Returns the configuration with the answers of a tokenizer in another format, if needed."""
    folder, checkpoint = config.checkpoint.model, config.checkpoint
    has_own = (folder / _TOKENIZER).is_file() or not folder.is_dir()
    if checkpoint.task != "score" or checkpoint.score_tokens or has_own:
        return config
    try:
        if not needs_answers(folder):
            return config
        content = TokenizerFiles.from_folder(folder).content(_TOKENIZER)
        if content is None:
            return config
        return config.with_flags(score_tokens=list(answers_of(content, folder)))
    except ConfigError as error:
        raise ModelFolderError(str(error)) from error


def _fetched(config: _Config, name: HubName, *, has_weights: bool) -> _Config:
    """Returns the configuration with the folder of a hub's model."""
    # Takes a while to import, and most engines start from a folder.
    from services.hub.fetch import fetch

    needs_weights = has_weights and config.checkpoint.load_format != "dummy"
    progress = _LoggedProgress(str(name))
    folder = fetch(
        name,
        has_weights=needs_weights,
        gguf_file=config.checkpoint.gguf_file,
        report=progress.report,
    )
    log.info("model_fetched", model=str(name), folder=str(folder), elapsed_s=progress.elapsed_s)
    served_name = config.checkpoint.served_model_name or name.repository
    return config.with_flags(model=folder, served_model_name=served_name)


class _LoggedProgress:
    """Logs how far a download is, every LOG_INTERVAL_S."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._start_s = self._logged_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return round(time.monotonic() - self._start_s, 1)

    def report(self, num_bytes: int, total_bytes: int) -> None:
        """Takes the progress from any thread."""
        now_s = time.monotonic()
        if now_s - self._logged_s < LOG_INTERVAL_S:
            return
        self._logged_s = now_s
        log.info(
            "model_fetch_progressed",
            model=self._model,
            done_mb=num_bytes // 2**20,
            total_mb=total_bytes // 2**20,
        )
