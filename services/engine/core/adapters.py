"""The adapters that requests may name: added and removed while the engine serves."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import NoReturn, Protocol

import structlog

from services.engine.adapter import Adapter
from services.engine.checkpoint.adapter_folder import folder_digest, folder_under, start_folder
from services.engine.config.lora import ADAPTER_NAME, LoraConfig
from services.engine.core.adapter_figures import AdapterFigures, ReadCounts
from services.engine.errors import (
    DuplicateRequestError,
    EngineError,
    EngineUnavailableError,
    InvalidRequestError,
    NotPermittedError,
    UnknownModelError,
)
from services.engine.request import Request
from services.engine.worker.adapter_orders import AdapterOrders
from services.engine.worker.rank_process import WorkerDiedError

log = structlog.get_logger()

UNUSED_POLL_S = 0.25
"""Pause between looks at whether a removed adapter has requests, or others are read."""


class AdapterWorker(Protocol):
    """The part of an executor that reads adapters."""

    @property
    def adapters(self) -> AdapterOrders:
        """Orders to read and forget adapters."""


class StartRefusedError(WorkerDiedError):
    """An adapter of the command line cannot be loaded."""


class Adapters:
    """The known adapters. All methods run in one event loop."""

    def __init__(
        self,
        config: LoraConfig,
        *,
        model: str,
        live: Callable[[], Iterable[Request]],
        end: Callable[[Request, EngineError], None],
    ) -> None:
        """Starts without adapters.

        Args:
            config: the operator's.
            model: name of the model, which no adapter may have.
            live: returns all live requests.
            end: ends one.
        """
        self._config = config
        self._model = model
        self._live = live
        self._end = end
        self._worker: AdapterWorker | None = None
        self._known: dict[str, Adapter] = {}
        self._loading: set[str] = set()
        self._forgetting: set[asyncio.Task[None]] = set()
        self._num_due = 0
        """Removed adapters that wait for the end of all reads."""
        self._has_started = False
        self._are_announced = False
        self._counts = ReadCounts()
        self.version = 0
        """Changes with every adapter that is added or removed."""

    @property
    def all(self) -> list[Adapter]:
        """The known adapters, by name."""
        return [adapter for _, adapter in sorted(self._known.items())]

    @property
    def _removed(self) -> list[Adapter]:
        """Adapters that were removed while requests run that still need them."""
        used = {id(each.adapter): each.adapter for each in self._live() if each.adapter is not None}
        return [each for each in used.values() if self._known.get(each.name) is not each]

    @property
    def must_read(self) -> bool:
        """Whether the next worker must read adapters before it serves."""
        must_start = bool(self._config.start_adapters) and not self._has_started
        return must_start or bool(self._known or self._removed)

    def figures(self, resident: frozenset[bytes]) -> AdapterFigures | None:
        """Returns figures, given the adapters in slots; None if there are no slots."""
        if not self._config.max_loras:
            return None
        return AdapterFigures.of(
            self._live(),
            resident,
            self._counts,
            num_slots=self._config.max_loras,
            num_known=len(self._known),
        )

    def find(self, name: str) -> Adapter | None:
        """Returns the adapter of a name; None if there is none."""
        return self._known.get(name)

    async def load(self, name: str, path: str) -> Adapter:
        """Reads an adapter from the operator's folder or the hub, while requests run.

        Raises:
            NotPermittedError: the operator allows no loading, or not from there.
            DuplicateRequestError: another adapter has the name.
            InvalidRequestError: name or path are malformed, something is wrong with the adapter, or
                there are too many.
            EngineUnavailableError: there is no worker, or it was lost.
        """
        root = self._config.lora_folder
        if root is None:
            folder_under(root, path)
        if ADAPTER_NAME.fullmatch(name) is None:
            raise InvalidRequestError(
                "an adapter's name has 1 to 128 letters, digits and . _ - / @ :", field="name"
            )
        # Removed adapters would wait for ever if there were always one that is read.
        await _until(lambda: not self._num_due)
        if name in self._known or name in self._loading or name == self._model:
            raise DuplicateRequestError(f"{name!r} is taken by another adapter or the model")
        if len(self._known) + len(self._loading) >= self._config.max_cpu_loras:
            raise InvalidRequestError(
                f"--max-cpu-loras is {self._config.max_cpu_loras}, and there are as many adapters"
            )
        self._loading.add(name)
        reading = asyncio.create_task(self._read_under(root, name, path))
        try:
            adapter = await asyncio.shield(reading)
        except asyncio.CancelledError:
            self._forget_later(self._abandon(name, reading))
            raise
        except BaseException:
            self._loading.discard(name)
            raise
        self._loading.discard(name)
        self._known[name] = adapter
        self.version += 1
        log.info("adapter_loaded", name=name, rank=adapter.rank, num_bytes=adapter.num_bytes)
        return adapter

    def remove(self, name: str) -> None:
        """Forgets an adapter; its requests go on.

        Raises:
            NotPermittedError: the operator allows no changes.
            UnknownModelError: there is none of this name.
        """
        if self._config.lora_folder is None:
            raise NotPermittedError(
                "adapters are not removed while serving; the engine lacks --lora-folder"
            )
        adapter = self._known.pop(name, None)
        if adapter is None:
            raise UnknownModelError(f"there is no adapter {name[:128]!r}", field="name")
        self.version += 1
        log.info("adapter_removed", name=name)
        self._forget_later(self._forget(adapter))

    async def announce(self) -> None:
        """Makes adapters of the command line known before a worker has read them.

        Frontends then have their requests wait for an engine that starts asleep.

        Raises:
            StartRefusedError: one cannot be found.
        """
        for name, path in self._config.start_adapters:
            try:
                folder = await asyncio.to_thread(start_folder, path)
                digest = await asyncio.to_thread(folder_digest, folder)
            except InvalidRequestError as error:
                raise StartRefusedError(f"--lora {name}: {error}") from None
            self._known[name] = Adapter(
                name=name, path=str(folder), digest=digest, rank=0, num_bytes=0
            )
        self._are_announced = True
        self.version += bool(self._known)

    async def use_worker(self, worker: AdapterWorker) -> None:
        """Has a new worker read all adapters; adapters that changed on disk are dropped.

        Raises:
            StartRefusedError: one of the command line cannot be loaded by the first worker.
        """
        self._worker = worker
        if not self._has_started:
            if any(name == self._model for name, _ in self._config.start_adapters):
                raise StartRefusedError(f"--lora {self._model}: the model has this name")
            for name, path in self._config.start_adapters:
                if self._was_removed_asleep(name):
                    continue
                try:
                    folder = await asyncio.to_thread(start_folder, path)
                    adapter = await self._read(name, folder)
                except InvalidRequestError as error:
                    raise StartRefusedError(f"--lora {name}: {error}") from None
                if self._was_removed_asleep(name):
                    self._forget_later(self._forget(adapter))
                else:
                    self._known[name] = adapter
            self._has_started = True
            self.version += bool(self._known)
            return
        for known in [*self._known.values(), *self._removed]:
            try:
                adapter = await self._read(known.name, Path(known.path))
            except InvalidRequestError as error:
                self._drop(known, str(error))
                continue
            if adapter.digest != known.digest:
                self._drop(known, "its files have changed")

    async def serve(
        self,
        worker: AdapterWorker,
        steps: Coroutine[None, None, NoReturn],
        begin: Callable[[], None],
    ) -> NoReturn:
        """Runs a new worker's steps, and calls `begin` once it has read all adapters.

        Raises:
            StartRefusedError: an adapter of the command line cannot be loaded.
        """
        if not self.must_read:
            await self.use_worker(worker)
            begin()
            await steps
        running = asyncio.create_task(steps)
        reading = asyncio.create_task(self.use_worker(worker))
        try:
            await asyncio.wait((running, reading), return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                reading.result()
                begin()
            await running
        finally:
            running.cancel()
            reading.cancel()
            await asyncio.gather(running, reading, return_exceptions=True)
        raise AssertionError("steps run until the worker is lost")

    def _was_removed_asleep(self, name: str) -> bool:
        """Whether an adapter of the command line was removed before a worker had read it."""
        return self._are_announced and name not in self._known

    def lose_worker(self) -> None:
        """Reads nothing until the next worker."""
        self._worker = None

    async def _read_under(self, root: Path | None, name: str, path: str) -> Adapter:
        return await self._read(name, await asyncio.to_thread(folder_under, root, path))

    async def _read(self, name: str, folder: Path) -> Adapter:
        if self._worker is None:
            raise EngineUnavailableError("the engine is not ready: its worker is starting")
        began_s = time.monotonic()
        try:
            read = await self._worker.adapters.read(str(folder))
        except WorkerDiedError:
            raise EngineUnavailableError("the worker was lost while it read an adapter") from None
        if read.error:
            raise InvalidRequestError(read.error, field="path")
        self._counts.num_read += 1
        self._counts.read_s += time.monotonic() - began_s
        return Adapter(
            name=name,
            path=str(folder),
            digest=read.digest,
            rank=read.rank,
            num_bytes=read.num_bytes,
        )

    def _drop(self, adapter: Adapter, reason: str) -> None:
        """Forgets an adapter that the new worker does not have, and ends its requests."""
        log.error("adapter_was_lost", name=adapter.name, reason=reason)
        if self._known.get(adapter.name) is adapter:
            del self._known[adapter.name]
            self.version += 1
        for request in self._live():
            if request.adapter is adapter:
                self._end(request, EngineUnavailableError("the request's adapter was lost"))

    def _forget_later(self, forget: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(forget)
        self._forgetting.add(task)
        task.add_done_callback(self._forgetting.discard)

    async def _abandon(self, name: str, reading: asyncio.Task[Adapter]) -> None:
        """Frees an adapter whose caller has gone, once workers, which read on, have it."""
        try:
            adapter = await reading
        except EngineError:
            return
        finally:
            self._loading.discard(name)
        await self._forget(adapter)

    async def _end_of_reads(self) -> None:
        """Waits until no adapter is being read; others are not read before that.

        One may be the adapter to forget, and the order to forget it the later.
        """
        self._num_due += 1
        try:
            await _until(lambda: not self._loading)
        finally:
            self._num_due -= 1

    async def _forget(self, adapter: Adapter) -> None:
        """Frees an adapter's memory once no request and no other name needs it."""
        digest = adapter.digest
        while True:
            await _until(lambda: all(each.adapter_digest != digest for each in self._live()))
            if not self._loading:
                break
            await self._end_of_reads()
        is_kept = any(each.digest == digest for each in self._known.values())
        if self._worker is not None and not is_kept:
            self._worker.adapters.forget(digest)


async def _until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110  removals are too rare to watch all that ends
        await asyncio.sleep(UNUSED_POLL_S)


def adapter_named(adapters: Adapters | None, name: str, *, model: str) -> Adapter | None:
    """Returns the adapter that a request names; None where it names the model or nothing.

    Raises:
        UnknownModelError: there is none.
    """
    if name in ("", model):
        return None
    adapter = None if adapters is None else adapters.find(name)
    if adapter is None:
        raise UnknownModelError(f"model {name!r} is not served here; {model!r} is", field="model")
    return adapter
