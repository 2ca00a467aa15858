"""Replaces a model's name on the hub by the folder that has its files."""

import time
from typing import TypeVar

import structlog

from services.engine.config.engine_config import EngineConfig
from services.hub.names import hub_name

log = structlog.get_logger()

LOG_INTERVAL_S = 5.0

_Config = TypeVar("_Config", bound=EngineConfig)


def with_local_model(config: _Config, *, has_weights: bool = True) -> _Config:
    """Returns the configuration with a folder for `model`, after fetching what the folder lacks.

    Args:
        config: its model is a folder or a name on the hub.
        has_weights: whether weights are fetched as well.

    Raises:
        HubError: the model cannot be fetched.
    """
    name = hub_name(config.checkpoint.model)
    if name is None:
        return config
    # Takes a while to import, and most engines start from a folder.
    from services.hub.fetch import fetch

    needs_weights = has_weights and config.checkpoint.load_format != "dummy"
    progress = _LoggedProgress(str(name))
    folder = fetch(name, has_weights=needs_weights, report=progress.report)
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
