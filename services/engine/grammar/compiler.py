"""Compiles grammars of requests in its own threads and processes."""

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import structlog
from llguidance import LLMatcher, LLTokenizer

from services.engine.constraint import Constraint
from services.engine.errors import InvalidRequestError, QueueFullError, UnsupportedError
from services.engine.grammar.constraint import FIELD, RETRY_AFTER_MS, GrammarConstraint, next_mask
from services.engine.grammar.grammar_text import (
    compile_grammar,
    make_tokenizer,
    shown,
    special_tokens_of,
)
from services.engine.grammar.probe_pool import NUM_PROBES, ProbePool
from services.engine.grammar.reasoning_budget import ReasoningBudget, ReasoningMarkers
from services.engine.grammar.tagged import Tokens
from services.engine.structured_output import StructuredOutput
from services.transport.counts import Counts
from services.transport.fair_turns import FairTurns

log = structlog.get_logger()

MAX_CACHED = 64
"""Compiled grammars kept; one takes some hundred kilobytes, at most 100 MB."""
MAX_COMPILING = 256
"""Grammars that may wait to be compiled."""
MAX_COMPILING_OF_CALLER = 64
"""Limit for one caller."""
LIVE = "structured_requests"
"""Name of the count of held or awaited constraints."""


@dataclass(frozen=True, slots=True)
class _Compiled:
    """The initial state of a grammar, to be copied, and the first token's mask."""

    matcher: LLMatcher
    mask: bytes


@dataclass(slots=True, eq=False)
class _Compilation:
    """The shared task that compiles a grammar."""

    task: "asyncio.Task[_Compiled]"
    num_waiting: int = 0


class GrammarCompiler:
    """Compiles each grammar once, and makes a constraint for each request.

    A probe process, which can be killed, first compiles a new grammar; only if that succeeds, a
    thread compiles it here. Equal grammars share the result.
    """

    def __init__(
        self,
        tokenizer_json: bytes,
        *,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        max_live: int,
        timeout_s: float,
        num_threads: int,
        counts: Counts,
    ) -> None:
        """Starts nothing before the first grammar.

        Args:
            tokenizer_json: content of the model's tokenizer.json.
            vocab_size: the model's.
            eos_token_ids: tokens that end a complete output.
            max_live: most constraints held or awaited at a time.
            timeout_s: time limit of a compilation, and of one token's mask.
            num_threads: threads that compute masks.
            counts: counts the constraints.
        """
        self._settings: dict[str, Any] = {
            "tokenizer_json": tokenizer_json.decode(errors="replace"),
            "vocab_size": vocab_size,
            "eos_token_ids": sorted(eos_token_ids),
        }
        self._special: Tokens = {}
        self._mask_bytes = 4 * -(-vocab_size // 32)
        self._max_live = max_live
        self._timeout_s = timeout_s
        self._probes = ProbePool(self._settings, timeout_s=timeout_s)
        self._counts = counts
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="grammar")
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="grammar-compiler")
        self._loading: asyncio.Task[LLTokenizer] | None = None
        self._turns = FairTurns(NUM_PROBES)
        self._known: OrderedDict[StructuredOutput, _Compilation] = OrderedDict()
        """Compiled grammars, the latest last."""
        self._pending: dict[tuple[str, StructuredOutput], _Compilation] = {}
        """Grammars that are compiled or wait for it, by caller: equal ones of others must not wait
        in the turns of this one."""

    def load(self) -> None:
        """Starts to read the tokenizer."""
        if self._loading is None:
            self._start_threads()
            self._loading = asyncio.create_task(self._load())

    async def tokenizer(self) -> LLTokenizer:
        """Waits for the tokenizer.

        Raises:
            UnsupportedError: llguidance cannot use the model's tokenizer.
        """
        self.load()
        assert self._loading is not None, "load has begun"
        return await asyncio.shield(self._loading)

    async def constrain(
        self, wanted: StructuredOutput, token_ids: Sequence[int] = (), *, caller: str = ""
    ) -> Constraint:
        """Returns a constraint at its beginning, or after the tokens of a resumed output.

        One with a grammar counts against the limit until it is closed. Callers take turns at the
        compilation of new grammars.

        Raises:
            InvalidRequestError: the grammar is wrong or too expensive.
            UnsupportedError: the model's tokenizer allows no grammars.
            QueueFullError: too many grammars are in use or wait for compilation.
        """
        max_tokens, preamble = wanted.max_preamble_tokens, wanted.preamble
        form = replace(wanted, max_preamble_tokens=None, begun="")
        grammar = None
        if form.kind is not None:
            grammar = await self._follow(form, wanted.begun, token_ids, caller)
        if max_tokens is None or preamble is None:
            assert grammar is not None, "an output without a form has a limited preamble"
            return grammar
        tokenizer = await self.tokenizer()
        budget = ReasoningBudget(
            ReasoningMarkers.of(preamble, tokenizer, self._special),
            max_tokens,
            tokenizer.decode_bytes,
            vocab_size=self._settings["vocab_size"],
            inner=grammar,
        )
        for token_id in token_ids:
            budget.count(token_id)
        return budget

    async def _follow(
        self, wanted: StructuredOutput, begun: str, token_ids: Sequence[int], caller: str
    ) -> GrammarConstraint:
        if not self._counts.take(LIVE, limit=self._max_live):
            raise QueueFullError(
                f"{self._counts.held(LIVE)} requests with structured output are live; the limit is "
                f"{self._max_live}",
                retry_after_ms=RETRY_AFTER_MS,
            )
        with self._giving_back_on_failure():
            compilation = await self._compiled(wanted, caller)
            compiled = compilation.task.result()
            matcher, mask = compiled.matcher.deep_copy(), compiled.mask
            if begun or token_ids:
                # Greedily: other ways take the spelling of a special token for that token.
                known = [*(await self.tokenizer()).greedy_tokenize(begun), *token_ids]
                loop = asyncio.get_running_loop()
                mask = await loop.run_in_executor(self._threads, self._go_on, matcher, known)
            return GrammarConstraint(
                matcher,
                mask,
                threads=self._threads,
                timeout_s=self._timeout_s,
                # Its copies share the states that they found: where one met a limit, all would.
                on_failure=partial(self._forget, wanted, compilation),
                on_close=partial(self._counts.give_back, LIVE),
            )

    async def close(self) -> None:
        """Ends threads and processes."""
        tasks: list[asyncio.Task[Any]] = [each.task for each in self._pending.values()]
        tasks += [self._loading] if self._loading is not None else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._probes.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._compiling.shutdown(wait=False, cancel_futures=True)

    @contextmanager
    def _giving_back_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._counts.give_back(LIVE)
            raise

    def _start_threads(self) -> None:
        """Starts all threads now, because the system may refuse them later."""
        may_end = threading.Event()
        try:
            for _ in range(self._num_threads):
                self._threads.submit(may_end.wait)
        finally:
            may_end.set()

    async def _compiled(self, wanted: StructuredOutput, caller: str) -> _Compilation:
        """Waits for the task of a grammar.

        If the last waiting request leaves, the task ends.
        """
        compilation = self._compilation(wanted, caller)
        compilation.num_waiting += 1
        try:
            await asyncio.shield(compilation.task)
            return compilation
        finally:
            compilation.num_waiting -= 1
            if not compilation.num_waiting and not compilation.task.done():
                compilation.task.cancel()
                self._pending.pop((caller, wanted), None)
            # An error refers to this frame, and the task to the error.
            del compilation

    def _compilation(self, wanted: StructuredOutput, caller: str) -> _Compilation:
        known = self._known.get(wanted)
        if known is not None:
            self._known.move_to_end(wanted)
            return known
        pending = self._pending.get((caller, wanted))
        if pending is not None:
            return pending
        num_own = sum(each == caller for each, _ in self._pending)
        for number, limit in (
            (num_own, MAX_COMPILING_OF_CALLER),
            (len(self._pending), MAX_COMPILING),
        ):
            if number >= limit:
                raise QueueFullError(
                    f"{number} grammars wait to be compiled; the limit is {limit}",
                    retry_after_ms=RETRY_AFTER_MS,
                )
        new = _Compilation(asyncio.create_task(self._compile(wanted, caller)))
        self._pending[caller, wanted] = new
        new.task.add_done_callback(lambda _: self._note(wanted, caller, new))
        return new

    def _note(self, wanted: StructuredOutput, caller: str, compilation: _Compilation) -> None:
        """Keeps the latest successful compilations."""
        if self._pending.get((caller, wanted)) is compilation:
            del self._pending[caller, wanted]
        task = compilation.task
        if task.cancelled() or task.exception() is not None:
            return
        self._known[wanted] = compilation
        while len(self._known) > MAX_CACHED:
            self._known.popitem(last=False)

    def _forget(self, wanted: StructuredOutput, compilation: _Compilation) -> None:
        if self._known.get(wanted) is compilation:
            del self._known[wanted]

    async def _load(self) -> LLTokenizer:
        loop = asyncio.get_running_loop()

        def read() -> tuple[LLTokenizer, Tokens]:
            special = special_tokens_of(self._settings["tokenizer_json"])
            return make_tokenizer(**self._settings), special

        try:
            tokenizer, self._special = await loop.run_in_executor(self._compiling, read)
        except ValueError as error:
            log.warning("structured_output_unavailable", reason=shown(str(error)))
            raise UnsupportedError(
                f"the engine cannot read this model's tokenizer: {shown(str(error))}",
                field=FIELD,
            ) from None
        return tokenizer

    async def _compile(self, wanted: StructuredOutput, caller: str) -> _Compiled:
        tokenizer = await self.tokenizer()
        text = await self._turns.run(caller, partial(self._probes.check, wanted))
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._compiling, self._compile_here, tokenizer, text)

    def _go_on(self, matcher: LLMatcher, token_ids: Sequence[int]) -> bytes:
        """Moves a matcher past the tokens of a begun output; returns the next mask."""
        end_s = time.thread_time() + self._timeout_s
        for token_id in token_ids:  # one by one: the library keeps the interpreter lock meanwhile
            matcher.consume_token(token_id)
            if time.thread_time() > end_s:
                raise InvalidRequestError(
                    f"following the output so far takes more than {self._timeout_s} s",
                    field=FIELD,
                )
        is_over = matcher.is_error() or matcher.is_stopped()
        mask = None if is_over else next_mask(matcher, self._mask_bytes)
        if mask is None:
            raise InvalidRequestError(
                "the output so far cannot go on by its grammar: with the text that it continues"
                " (structured_output.begun), it does not begin the form, or completes it",
                field=FIELD,
            )
        return mask

    def _compile_here(self, tokenizer: LLTokenizer, text: str) -> _Compiled:
        matcher = compile_grammar(tokenizer, text)
        mask = None if matcher.is_error() else next_mask(matcher, self._mask_bytes)
        if mask is None:
            raise InvalidRequestError("the grammar is refused: no output follows it", field=FIELD)
        return _Compiled(matcher, mask)
