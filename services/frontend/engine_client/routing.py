"""Chooses the engine for a request: the one that gets to its first token with the least work."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.frontend.engine_client.client import EngineClient
from services.frontend.engine_client.messages import EngineRequest
from services.frontend.engine_client.prefix_keys import compact_keys

MAX_ROUTED_BLOCKS = 1024
"""Blocks of a prompt that are compared with what engines have cached, about 1 ms of hashing."""


@dataclass(frozen=True, slots=True)
class Choice:
    """An engine, and the keys that a prompt's blocks will have there."""

    engine: EngineClient
    keys: list[int]
    num_blocks: int


def choose(engines: Sequence[EngineClient], request: EngineRequest) -> Choice:
    """Returns the engine with the least work: tokens held and waiting, plus tokens to compute.

    A cached prefix is worth the tokens that need not be computed, so it attracts requests until
    its engine is that much busier than another. Among equals, the one used least so far is taken.
    The sum of both in one unit follows NVIDIA Dynamo's KV router (docs, "KV cache routing").

    Args:
        engines: those that take requests, connected, at least one.
        request: what is to be sent.
    """
    num_tokens = len(request.prompt_token_ids)
    sizes = {_block_size(engine) for engine in engines}
    keys_by_size = {
        size: compact_keys(
            request.cache_salt, request.prompt_token_ids, size, max_blocks=MAX_ROUTED_BLOCKS
        )
        for size in sizes
    }

    def work(engine: EngineClient) -> tuple[bool, float, int]:
        size, view = _block_size(engine), engine.view
        num_missing = num_tokens - size * view.count_cached(keys_by_size[size])
        return view.is_stalled, size * view.num_load_blocks + num_missing, engine.num_sent

    engine = min(engines, key=work)
    size = _block_size(engine)
    return Choice(engine, keys_by_size[size], num_blocks=-(-num_tokens // size))


def _block_size(engine: EngineClient) -> int:
    assert engine.info is not None, "a connected engine has said what it serves"
    return max(1, engine.info.block_size)
