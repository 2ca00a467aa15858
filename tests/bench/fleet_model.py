"""Routing of many engines without any service: `python -m tests.bench.fleet_model`.

    python -m tests.bench.fleet_model --engines 8,64,256 --frontends 4,8 --weights balance=0,held=1

The rule and the view of engines are the frontend's own; engines, heartbeats and conversations are
events in modelled time, and conversations are like those of `tests.bench.fleet`. 64 engines take
seconds, so weights are compared here first. A step takes the same time whatever is in it.
"""

import argparse
import heapq
import itertools
import math
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from protos.engine.v1.engine_pb2 import Heartbeat, PrefixChanges
from services.engine.core.recent_work import TIME_CONSTANT_S
from services.frontend.engine_client.engine_view import EngineView
from services.frontend.engine_client.routing import WEIGHTS, Prospect, Weights, pick

BLOCK_SIZE = 16
SHARED_TOKENS, TURN_TOKENS, OUTPUT_TOKENS = 128, 48, 16
NUM_TURNS = 5
LATENCY_S = 0.003


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """A fleet and its load; conversations, streams and blocks are of each engine."""

    num_engines: int
    num_frontends: int
    groups: float
    conversations: int
    streams: int
    pause_s: float
    step_s: float
    heartbeat_s: float
    num_blocks: int = 512
    max_running: int = 256
    seed: int = 0


class Clock:
    """Runs events in the order of their times."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, delay_s: float, event: Callable[[], None]) -> None:
        """Runs an event later."""
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._numbers), event))

    def run(self, is_over: Callable[[], bool]) -> None:
        """Runs events until it is over."""
        while not is_over():
            self.now_s, _, event = heapq.heappop(self._events)
            event()


class Engine:
    """The prefix cache and the load of an engine."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.waiting: deque[Callable[[], None]] = deque()
        """Starts of the requests that wait for others to end."""
        self.num_computed = 0
        self.num_running = 0
        self.held: Counter[int] = Counter()
        self.num_own = 0
        """Blocks of running requests that no other request can find."""
        self._found: dict[int, None] = {}
        """Keys in the order of their last use."""
        self._journal: list[tuple[int, bool]] = []
        self._recent, self._recent_s = 0.0, 0.0

    def begin(self, keys: list[int], num_tokens: int, now_s: float) -> int:
        """Starts a request; returns how many of its blocks were cached."""
        full = keys[: (num_tokens - 1) // BLOCK_SIZE]
        num_cached = sum(1 for _ in itertools.takewhile(self._found.__contains__, full))
        self.num_running += 1
        self.held.update(keys[:num_cached])
        self.num_own += self._num_own(num_tokens, num_cached)
        computed = num_tokens - BLOCK_SIZE * num_cached + OUTPUT_TOKENS
        self.num_computed += computed
        self._recent = self.recent(now_s) + computed
        self._recent_s = now_s
        return num_cached

    def keep(self, keys: list[int]) -> None:
        """Caches blocks, and overwrites the ones that were unused for longest."""
        for key in keys:
            if key not in self._found:
                self._journal.append((key, True))
            self._found.pop(key, None)
            self._found[key] = None
        num_over = len(self._found) + self.num_own - self.num_blocks
        unused = (key for key in self._found if not self.held[key])
        for key in list(itertools.islice(unused, max(0, num_over))):
            del self._found[key]
            self._journal.append((key, False))

    def end(self, keys: list[int], num_tokens: int, num_cached: int) -> None:
        """Ends a request of these keys, output included."""
        self.num_running -= 1
        self.held.subtract(keys[:num_cached])
        self.held += Counter()
        self.num_own -= self._num_own(num_tokens, num_cached)
        self.keep(keys)

    def recent(self, now_s: float) -> float:
        """Returns the tokens computed lately."""
        return self._recent * math.exp((self._recent_s - now_s) / TIME_CONSTANT_S)

    def heartbeat(self, position: int, now_s: float) -> tuple[Heartbeat, int]:
        """Returns a heartbeat with what changed after a position, and the next position."""
        latest = dict(self._journal[position:])
        keys = {
            is_added: np.array([k for k, is_in in latest.items() if is_in == is_added], "<u8")
            for is_added in (True, False)
        }
        changes = PrefixChanges(added=keys[True].tobytes(), removed=keys[False].tobytes())
        heartbeat = Heartbeat(
            num_running=self.num_running,
            num_waiting=len(self.waiting),
            num_used_blocks=self.num_own + len(self.held),
            num_recent_tokens=round(self.recent(now_s)),
            prefixes=changes,
            ready=True,
        )
        return heartbeat, len(self._journal)

    def _num_own(self, num_tokens: int, num_cached: int) -> int:
        return -(-(num_tokens + OUTPUT_TOKENS) // BLOCK_SIZE) - num_cached


class Model:
    """Conversations with a fleet, in modelled time."""

    def __init__(self, fleet: Fleet, weights: Weights) -> None:
        self.engines = [Engine(fleet.num_blocks) for _ in range(fleet.num_engines)]
        self.num_prompt = self.num_cached = self.num_requests = 0
        self.num_queued = self.num_queued_beside_idle = 0
        self._fleet = fleet
        self._weights = weights
        self._clock = Clock()
        self._random = random.Random(fleet.seed)
        self._draws = [random.Random(seed) for seed in range(fleet.num_frontends)]
        self._views = [[EngineView() for _ in self.engines] for _ in self._draws]
        num_groups = max(1, round(fleet.groups * fleet.num_engines))
        num_conversations = fleet.conversations * fleet.num_engines
        self._waiting = [number % num_groups for number in range(num_conversations)]
        self._num_open = num_conversations
        self._random.shuffle(self._waiting)

    def run(self) -> None:
        """Runs all conversations."""
        for views in self._views:
            for engine, view in zip(self.engines, views, strict=True):
                delay_s = self._random.uniform(0, self._fleet.heartbeat_s)
                self._clock.after(delay_s, lambda e=engine, v=view: self._beat(e, v, 0))
        for _ in range(self._fleet.streams * len(self.engines)):
            self._converse()
        self._clock.run(lambda: not self._num_open)

    def _beat(self, engine: Engine, view: EngineView, position: int) -> None:
        heartbeat, position = engine.heartbeat(position, self._clock.now_s)
        view.take(heartbeat)
        self._clock.after(self._fleet.heartbeat_s, lambda: self._beat(engine, view, position))

    def _converse(self) -> None:
        if self._waiting:
            group = self._waiting.pop()
            self._pause([(group, index) for index in range(SHARED_TOKENS)], 0)

    def _pause(self, tokens: list[tuple[int, int]], turn: int) -> None:
        delay_s = self._random.expovariate(1 / self._fleet.pause_s)
        self._clock.after(delay_s, lambda: self._ask(tokens, turn))

    def _ask(self, tokens: list[tuple[int, int]], turn: int) -> None:
        tokens = tokens + self._new_tokens(TURN_TOKENS)
        keys = _keys(tokens)
        frontend = self._random.randrange(self._fleet.num_frontends)
        views = self._views[frontend]
        prospects = [
            Prospect(
                num_cached=BLOCK_SIZE * view.count_cached(keys),
                num_queued=BLOCK_SIZE * view.num_queued_blocks,
                num_held=BLOCK_SIZE * view.num_held_blocks,
                num_recent=view.heartbeat.num_recent_tokens + BLOCK_SIZE * view.num_sent_blocks,
                is_full=view.num_requests >= self._fleet.max_running,
            )
            for view in views
        ]
        index = pick(prospects, len(tokens), self._draws[frontend], self._weights)
        missing = len(tokens) - prospects[index].num_cached
        views[index].expect(keys, num_blocks=-(-missing // BLOCK_SIZE))
        engine = self.engines[index]
        self._clock.after(LATENCY_S, lambda: self._arrive(engine, tokens, keys, turn))

    def _arrive(
        self, engine: Engine, tokens: list[tuple[int, int]], keys: list[int], turn: int
    ) -> None:
        """Starts a request, or lets it wait while the engine runs as many as it can."""
        self.num_requests += 1
        if engine.num_running < self._fleet.max_running:
            self._serve(engine, tokens, keys, turn)
            return
        self.num_queued += 1
        self.num_queued_beside_idle += any(not each.num_running for each in self.engines)
        engine.waiting.append(lambda: self._serve(engine, tokens, keys, turn))

    def _serve(
        self, engine: Engine, tokens: list[tuple[int, int]], keys: list[int], turn: int
    ) -> None:
        num_cached = engine.begin(keys, len(tokens), self._clock.now_s)
        self.num_prompt += len(tokens)
        self.num_cached += BLOCK_SIZE * num_cached
        self._clock.after(1.5 * self._fleet.step_s, lambda: engine.keep(keys))

        def end() -> None:
            whole = tokens + self._new_tokens(OUTPUT_TOKENS)
            engine.end(_keys(whole), len(tokens), num_cached)
            if engine.waiting:
                engine.waiting.popleft()()
            if turn + 1 < NUM_TURNS:
                self._pause(whole, turn + 1)
            else:
                self._num_open -= 1
                self._converse()

        self._clock.after((OUTPUT_TOKENS + 1) * self._fleet.step_s, end)

    def _new_tokens(self, count: int) -> list[tuple[int, int]]:
        first = self._random.getrandbits(60)
        return [(first, index) for index in range(count)]


def _keys(tokens: list[tuple[int, int]]) -> list[int]:
    """Returns a key for each full block, which stands for all tokens up to its end."""
    key, keys = 0, []
    for start in range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE):
        key = hash((key, *tokens[start : start + BLOCK_SIZE])) % 2**64
        keys.append(key)
    return keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of one run: shares of prompt tokens and of requests, and loads.

    hit_rate: prompt tokens found in caches. spread: the largest load over the mean. queued:
    requests that had to wait. beside_idle: requests that waited while another engine had none.
    """

    hit_rate: float
    spread: float
    queued: float
    beside_idle: float


def figures(fleet: Fleet, weights: Weights) -> Figures:
    """Returns the figures of a fleet."""
    model = Model(fleet, weights)
    model.run()
    loads = [engine.num_computed for engine in model.engines]
    return Figures(
        hit_rate=model.num_cached / model.num_prompt,
        spread=max(loads) * len(loads) / sum(loads),
        queued=model.num_queued / model.num_requests,
        beside_idle=model.num_queued_beside_idle / model.num_requests,
    )


def as_one(fleet: Fleet) -> Fleet:
    """Returns an engine with the cache and the load of all."""
    size = fleet.num_engines
    return replace(
        fleet,
        num_engines=1,
        groups=max(1, round(fleet.groups * size)),
        conversations=fleet.conversations * size,
        streams=fleet.streams * size,
        num_blocks=fleet.num_blocks * size,
        max_running=fleet.max_running * size,
    )


def main() -> None:
    """Computes and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    numbers = {"type": lambda text: [int(each) for each in text.split(",")]}
    parser.add_argument("--engines", default=[8, 64], help="numbers of engines", **numbers)
    parser.add_argument("--frontends", default=[4], help="numbers of frontends", **numbers)
    parser.add_argument("--groups", type=float, default=1, help="for each engine; 0: one in all")
    parser.add_argument("--conversations", type=int, default=16, help="for each engine")
    parser.add_argument("--streams", type=int, default=4, help="at a time, for each engine")
    parser.add_argument("--pause-s", type=float, default=1.0, help="mean pause before a turn")
    parser.add_argument("--step-ms", type=float, default=20.0, help="time of one step")
    parser.add_argument("--heartbeat-ms", type=float, default=100.0, help="of each engine")
    parser.add_argument("--num-blocks", type=int, default=512, help="of each engine")
    parser.add_argument("--max-running", type=int, default=256, help="requests, of each engine")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--weights", default="", help="changed weights: balance=0,held=1")
    arguments = parser.parse_args()
    changes = dict(change.split("=") for change in arguments.weights.split(",") if change)
    weights = replace(
        WEIGHTS, **{name: type(getattr(WEIGHTS, name))(text) for name, text in changes.items()}
    )
    print(
        "| engines | frontends | hit rate | of one engine's | load spread | queued | beside idle |",
        "|---|---|---|---|---|---|---|",
        sep="\n",
    )
    for num_engines in arguments.engines:
        fleet = Fleet(
            num_engines=num_engines,
            num_frontends=1,
            groups=arguments.groups,
            conversations=arguments.conversations,
            streams=arguments.streams,
            pause_s=arguments.pause_s,
            step_s=arguments.step_ms / 1000,
            heartbeat_s=arguments.heartbeat_ms / 1000,
            num_blocks=arguments.num_blocks,
            max_running=arguments.max_running,
            seed=arguments.seed,
        )
        whole = figures(as_one(fleet), weights).hit_rate
        for num_frontends in arguments.frontends:
            found = figures(replace(fleet, num_frontends=num_frontends), weights)
            print(
                f"| {num_engines} | {num_frontends} | {found.hit_rate:.3f} |"
                f" {found.hit_rate / whole:.3f} | {found.spread:.2f} | {found.queued:.4f} |"
                f" {found.beside_idle:.4f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
