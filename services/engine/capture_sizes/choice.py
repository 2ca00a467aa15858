"""Replaces `--cudagraph-capture-sizes auto` by planned sizes before the worker starts."""

from collections.abc import Mapping

import structlog

from services.engine.capture_sizes.history import load_history
from services.engine.capture_sizes.planner import Fit, plan_sizes
from services.engine.config.compilation import AUTO
from services.engine.config.engine_config import EngineConfig

log = structlog.get_logger()

MIN_STEPS = 1000
"""Fewer steps of a kind are not representative."""


def with_planned_sizes(config: EngineConfig) -> EngineConfig:
    """Returns the configuration with sizes instead of `auto`.

    The service does this once, so a restarted worker captures the same sizes. Each kind of graph
    gets at most as many sizes as cuda_graph_sizes gives it, with at least the same largest size. A
    kind with fewer than MIN_STEPS steps keeps the sizes of cuda_graph_sizes.
    """
    if config.compilation.cudagraph_capture_sizes != AUTO:
        return config
    history = load_history(config)
    # The service does not know the device. A device without graphs ignores the sizes.
    wanted, mode = config.compilation, config.compilation.graph_mode("cuda")
    decodes, pieces = history.by_graph_kind(mode)
    decode_sizes = wanted.capture_sizes(history.max_decode_size)
    piece_sizes = wanted.piece_sizes(history.max_num_batched_tokens)
    if mode.has_full_cudagraphs():
        decode_sizes = _choose("decodes", decodes, pattern=decode_sizes)
    if mode.mixed_mode() and wanted.cudagraph_piece_sizes is None:
        piece_sizes = _choose("pieces", pieces, pattern=piece_sizes)
    return config.with_flags(
        cudagraph_capture_sizes=list(decode_sizes), cudagraph_piece_sizes=list(piece_sizes)
    )


def _choose(graphs: str, counts: Mapping[int, int], *, pattern: tuple[int, ...]) -> tuple[int, ...]:
    num_steps = sum(counts.values())
    if num_steps < MIN_STEPS:
        log.info(
            "capture_sizes_not_planned", graphs=graphs, num_steps=num_steps, min_steps=MIN_STEPS
        )
        return pattern
    if not pattern:
        return pattern
    sizes = plan_sizes(counts, num_graphs=len(pattern), reach=pattern[-1])
    log.info(
        "capture_sizes_planned",
        graphs=graphs,
        num_steps=num_steps,
        sizes=list(sizes),
        expected_padding=round(Fit.of(counts, sizes).padding, 4),
        pattern_padding=round(Fit.of(counts, pattern).padding, 4),
    )
    return sizes
