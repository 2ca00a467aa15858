"""Refuses flags that a model has no room for, and lets fewer requests run than by default first."""

from contextlib import suppress
from typing import TypeVar

import structlog

from models.config import ModelConfig
from services.engine.checkpoint.model_files import ModelFolderError
from services.engine.checkpoint.table_memory import check_table_memory
from services.engine.config.engine_config import EngineConfig
from services.engine.config.scheduler import SchedulerConfig
from services.engine.model_fit import check_model_fit

FEWER_SEQS = 256
"""Most requests in a step of a model that has no room for as many as by default."""

log = structlog.get_logger()

_Config = TypeVar("_Config", bound=EngineConfig)


def with_fitting_requests(config: _Config, model: ModelConfig) -> _Config:
    """Returns the configuration, with FEWER_SEQS where the default number of requests is too many.

    The tables of very long sequences would be too large, or a step would have no room for a whole
    image beside as many decodes. Another number than the default is left alone.

    Raises:
        ModelFolderError: the flags do not fit the model.
    """
    try:
        _check(config, model)
    except ModelFolderError as error:
        if config.scheduler.max_num_seqs == SchedulerConfig().max_num_seqs:
            fewer = config.with_flags(max_num_seqs=FEWER_SEQS)
            with suppress(ModelFolderError):
                _check(fewer, model)
                log.info("fewer_requests_run", max_num_seqs=FEWER_SEQS, reason=str(error))
                return fewer
        raise
    return config


def _check(config: EngineConfig, model: ModelConfig) -> None:
    try:
        check_model_fit(config, model)
    except ValueError as error:
        raise ModelFolderError(str(error)) from error
    check_table_memory(config, model)
