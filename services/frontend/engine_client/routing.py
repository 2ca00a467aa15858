"""Chooses the engine that needs the least work for a request."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.frontend.engine_client.client import EngineClient
from services.frontend.engine_client.messages import EngineRequest
from services.frontend.engine_client.prefix_keys import compact_keys

MAX_ROUTED_BLOCKS = 1024
"""Leading blocks of a prompt compared with cached prefixes, about 1 ms of hashing."""
COMPUTED_COST = 4
"""Work of an uncached prompt token, which is computed, then held. One held for 250 decode steps
costs a third of one computed (Qwen3-8B on an H200). With 2, conversations leave their engines too
readily; with 5, loads grow uneven (docs/scale.md)."""


@dataclass(frozen=True, slots=True)
class Choice:
    """An engine, the keys of the prompt's blocks there, and how many it has not cached."""

    engine: EngineClient
    keys: list[int]
    num_missing_blocks: int


def choose(engines: Sequence[EngineClient], request: EngineRequest) -> Choice:
    """Returns the engine with the least work.

    That is the tokens it holds, and COMPUTED_COST times those of the prompt that it must compute.
    Ties go to the engine that has waited longest. Source of the sum: the cost function of NVIDIA
    Dynamo's KV-aware router.
    """
    num_tokens = len(request.prompt_token_ids) // 4
    keys_by_size = {
        size: compact_keys(
            request.cache_salt, request.prompt_token_ids, size, max_blocks=MAX_ROUTED_BLOCKS
        )
        for size in {_block_size(engine) for engine in engines}
    }

    def num_missing(engine: EngineClient) -> int:
        size = _block_size(engine)
        return num_tokens - size * engine.view.count_cached(keys_by_size[size])

    def work(engine: EngineClient) -> tuple[bool, float, float]:
        num_held = _block_size(engine) * engine.view.num_load_blocks
        num_computed = COMPUTED_COST * num_missing(engine)
        return engine.view.is_stalled, num_held + num_computed, engine.last_sent_s

    engine = min(engines, key=work)
    size = _block_size(engine)
    return Choice(engine, keys_by_size[size], num_missing_blocks=-(-num_missing(engine) // size))


def _block_size(engine: EngineClient) -> int:
    assert engine.info is not None, "a connected engine has said what it serves"
    return max(1, engine.info.block_size)
