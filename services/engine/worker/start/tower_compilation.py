"""Compiles the layers of an encoder of images."""

import time

import structlog

from models.layers.vision_tower import TowerLayers
from services.engine.worker.start.loaded_model import Forward, LoadedModel
from services.engine.worker.start.model_trace import TRACED_LEVELS

log = structlog.get_logger()

TowerCode = list[tuple[TowerLayers, list[Forward]]]
"""Groups of layers, and the code that runs in the place of each of their layers."""


def compile_tower(loaded: LoadedModel) -> TowerCode:
    """Compiles the layers of a model's encoder at the levels that compile; any thread may call it.

    Where that fails, the log says why and the encoder runs as it is written.

    loaded: a model with an encoder or without.
    """
    tower, settings = loaded.model.visual, loaded.config.compilation
    groups = [] if tower is None else [m for m in tower.modules() if isinstance(m, TowerLayers)]
    if not groups or settings.level not in TRACED_LEVELS:
        return []
    # Imported here, as the compiler takes 2 s to import.
    from services.engine.compilation.cache.cache_key import compute_factors
    from services.engine.compilation.compile_layers import compile_layers
    from services.engine.compilation.compile_model import make_manager
    from services.engine.compilation.pieces.piece_compiler import PieceCompiler

    started_s = time.monotonic()
    rank = loaded.ranks.place.rank
    factors = compute_factors(loaded.config, loaded.model.config, loaded.device, rank=rank)
    try:
        compiler = PieceCompiler(make_manager(settings, factors))
        cache = loaded.trace.cache
        code = [
            (layers, compile_layers(layers, compiler, name=f"tower_{number}", cache=cache))
            for number, layers in enumerate(groups)
        ]
    except Exception:  # whatever it is, the encoder runs as it is written
        log.exception("encoder_not_compiled")
        return []
    log.info(
        "encoder_compiled",
        num_layers=sum(map(len, groups)),
        compile_s=round(time.monotonic() - started_s, 3),
    )
    return code
