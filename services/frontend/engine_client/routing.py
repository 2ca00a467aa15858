"""Chooses the engine that needs the least work for a request."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from services.frontend.engine_client.client import EngineClient
from services.frontend.engine_client.messages import EngineRequest, ModelInfo
from services.frontend.engine_client.prefix_keys import compact_keys

MAX_ROUTED_BLOCKS = 1024
"""Leading blocks of a prompt compared with cached prefixes, about 1 ms of hashing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """How much else counts as work when a prompt token to compute is 1. Figures: docs/scale.md."""

    queued: float = 1 / 4
    """A token that waits: most tokens of waiting conversations are cached, and some are computed
    before the next heartbeat."""
    held: float = 1 / 32
    """A token that a running request holds. The more it counts, the more often conversations leave
    the engine that has them cached."""
    balance: float = 4
    """An engine with 1 / balance more recent work than the mean is charged the whole prompt."""
    load: int = 1024
    """Tokens that loading an adapter is worth: it may wait for a slot, and takes one."""
    least_mean_tokens: int = 4096
    """Recent work below which engines are idle enough to be uneven."""
    num_drawn: int = 2
    """Engines drawn at random, and again among the engines with most of the prompt."""


WEIGHTS = Weights()


@dataclass(slots=True, kw_only=True)  # frozen, it would take three times as long to make
class Prospect:
    """The state of an engine, and what it has of a prompt. In tokens."""

    num_cached: int
    num_queued: float
    """Tokens of waiting requests and of requests just sent."""
    num_held: int
    """Tokens of running requests."""
    num_recent: float | None
    """Tokens computed lately; older ones count less. None of an engine that does not say."""
    must_load: bool = False
    """Whether the request's adapter must get a slot of the device first."""
    is_full: bool = False
    """Whether a further request would wait until another one ends."""


@dataclass(frozen=True, slots=True)
class Choice:
    """An engine, the keys of the prompt's blocks there, and how many it has not cached."""

    engine: EngineClient
    keys: list[int]
    num_missing_blocks: int


def choose(engines: Sequence[EngineClient], request: EngineRequest, draw: random.Random) -> Choice:
    """Returns the engine with the least work; one whose step hangs only if all steps hang."""
    engines = [engine for engine in engines if not engine.view.is_stalled] or engines
    num_tokens = len(request.prompt_token_ids) // 4
    forms = [(_block_size(engine), engine.view.heartbeat.weights_salt) for engine in engines]
    keys = {
        (size, weights_salt): compact_keys(
            request.cache_salt,
            request.prompt_token_ids,
            size,
            max_blocks=MAX_ROUTED_BLOCKS,
            images=request.images,
            adapter_digest=request.adapter_digest,
            weights_salt=weights_salt,
        )
        for size, weights_salt in set(forms)
    }
    prospects = [
        _prospect(engine, form[0], keys[form], request.adapter)
        for engine, form in zip(engines, forms, strict=True)
    ]
    index = pick(prospects, num_tokens, draw)
    size, _ = form = forms[index]
    num_missing = num_tokens - prospects[index].num_cached
    return Choice(engines[index], keys[form], num_missing_blocks=-(-num_missing // size))


def pick(
    prospects: Sequence[Prospect],
    num_tokens: int,
    draw: random.Random,
    weights: Weights = WEIGHTS,
) -> int:
    """Returns the index of the engine with the least work for a prompt of `num_tokens`.

    Work is what must be computed, part of what is queued and held, and a charge for being over
    the mean of recent work, or a credit for being under it, of at most the prompt. An engine that
    runs as many requests as it can gets one only if all others do, too. Among many engines only a
    few are compared, drawn so that frontends do not agree by chance on one.

    Sources: the sum is the cost function of NVIDIA Dynamo's KV-aware router; the charge is a soft
    form of Mirrokni, Thorup and Zadimoghaddam 2018, "Consistent hashing with bounded loads"; the
    draw is Mitzenmacher 2000, "How useful is old information?".
    """
    known = [prospect.num_recent for prospect in prospects if prospect.num_recent is not None]
    mean = sum(known) / max(1, len(known))
    scale = weights.balance / max(mean, weights.least_mean_tokens)

    def work(index: int) -> tuple[float, float]:
        prospect = prospects[index]
        excess = 0.0 if prospect.num_recent is None else prospect.num_recent - mean
        charge = max(-1.0, min(1.0, scale * excess))
        tokens = (
            weights.load * prospect.must_load
            + weights.queued * prospect.num_queued
            + weights.held * prospect.num_held
        )
        return num_tokens - prospect.num_cached + num_tokens * charge + tokens, draw.random()

    return min(_draw(prospects, draw, weights.num_drawn), key=work)


def _draw(prospects: Sequence[Prospect], draw: random.Random, num_drawn: int) -> set[int]:
    """Returns the indices of the engines to compare, without full ones if others are left."""
    every = range(len(prospects))
    indices = [index for index in every if not prospects[index].is_full] or every
    if len(indices) <= 2 * num_drawn:
        return set(indices)
    most = max(prospects[index].num_cached for index in indices)
    warmest = [index for index in indices if prospects[index].num_cached == most]
    chosen = draw.sample(warmest, min(num_drawn, len(warmest)))
    return {*chosen, *draw.sample(indices, num_drawn)}


def _prospect(engine: EngineClient, block_size: int, keys: list[int], adapter: str) -> Prospect:
    view, max_running = engine.view, _info(engine).max_running
    num_sent, num_recent = block_size * view.num_sent_blocks, view.num_recent_tokens
    return Prospect(
        num_cached=block_size * view.count_cached(keys),
        num_queued=block_size * view.num_queued_blocks,
        num_held=block_size * view.num_held_blocks,
        num_recent=None if num_recent is None else num_recent + num_sent,
        must_load=bool(adapter) and not view.adapters[adapter].is_resident,
        is_full=0 < max_running <= view.num_requests,
    )


def _block_size(engine: EngineClient) -> int:
    return max(1, _info(engine).block_size)


def _info(engine: EngineClient) -> ModelInfo:
    assert engine.info is not None, "a connected engine has said what it serves"
    return engine.info
