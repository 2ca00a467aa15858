"""All engines of this frontend."""

import asyncio
import random
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NoReturn, Self

import structlog

from services.frontend.config import FrontendConfig
from services.frontend.engine_client.adapter_orders import AdapterOrders
from services.frontend.engine_client.addresses import AddressBook, EngineAddress
from services.frontend.engine_client.client import EngineClient, ModelHandler
from services.frontend.engine_client.messages import EngineRequest, ModelInfo, TokenSink
from services.frontend.engine_client.model_identity import ModelIdentity
from services.frontend.engine_client.routing import choose
from services.frontend.engine_client.routing_counts import RoutingCounts
from services.frontend.engine_client.swapper import SwapLimits, Swapper
from services.frontend.engine_client.tokenizer_files import TokenizerStore
from services.frontend.errors import (
    DuplicateRequestError,
    EngineFaultError,
    EngineUnavailableError,
    FrontendError,
    InvalidRequestError,
    UnknownModelError,
)
from services.transport.tls import ClientTls

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    """Limits of engines and their requests."""

    max_message_bytes: int = 16 * 2**20
    """Largest message sent or accepted."""
    silence_timeout_s: float = 2.5
    """An engine that is silent for this long is lost."""
    max_attempts: int = 3
    """Engines tried for one token of a request."""
    resolve_interval_s: float = 5.0
    """Interval between resolutions of host names."""
    names_engines: bool = True
    """Whether errors show engine addresses to callers; the log always does."""
    swaps: SwapLimits | None = None
    """How engines take turns at a card that they share, each with a model of its own; None if they
    all serve one model."""

    @classmethod
    def of(cls, config: FrontendConfig, *, names_engines: bool) -> Self:
        """Reads the limits of a configuration."""
        level = config.swap_level
        return cls(
            max_message_bytes=config.max_message_bytes,
            silence_timeout_s=config.engine_silence_timeout_s,
            max_attempts=config.max_engine_attempts,
            resolve_interval_s=config.engine_resolve_interval_s,
            names_engines=names_engines,
            swaps=(
                None if level is None else SwapLimits.of(config, level, names_reasons=names_engines)
            ),
        )


class EnginePool:
    """Keeps a session with each engine, and sends each request to the best one.

    The first engine to connect sets the model; engines with another one are refused, unless they
    share a card. `run` keeps the sessions; all other methods may be called at any time.
    """

    def __init__(
        self,
        addresses: AddressBook,
        tokenizers: TokenizerStore,
        limits: PoolLimits,
        *,
        tls: ClientTls | None = None,
    ) -> None:
        """Connects nowhere yet."""
        self.counts = RoutingCounts()
        self.limits = limits
        self._addresses = addresses
        self._tokenizers = tokenizers
        self._tls = tls
        self._frontend_id = f"frontend-{uuid.uuid4().hex[:8]}"
        self._engines: dict[EngineAddress, EngineClient] = {}
        self._tasks: dict[EngineAddress, asyncio.Task[None]] = {}
        self._was_ready = False
        self._draw = random.Random()  # each frontend draws other engines
        self.swapper = None if limits.swaps is None else Swapper(limits.swaps)
        """Decides which engine of a shared card is awake; None if none is shared."""

    @property
    def engines(self) -> list[EngineClient]:
        """The engines, in the order of their addresses, leaving ones last."""
        return list(self._engines.values())

    @property
    def is_ready(self) -> bool:
        """Whether an engine accepts requests now, or would once it has the card."""
        if self.swapper is not None:
            return self.swapper.is_ready
        return any(engine.is_ready for engine in self._engines.values())

    @property
    def num_live(self) -> int:
        """Unfinished requests at all engines."""
        return sum(engine.num_live for engine in self._engines.values())

    @property
    def unavailable(self) -> EngineUnavailableError:
        """The error for a request while no engine accepts any."""
        if not self.limits.names_engines:
            return EngineUnavailableError("no engine takes requests now")
        reasons = [
            f"no engine at {engine.address.target}: {engine.reason or 'it was tried'}"
            for engine in self._engines.values()
        ]
        if self._addresses.problem:
            reasons.append(self._addresses.problem)
        return EngineUnavailableError("; ".join(reasons) or "no engine has been looked for yet")

    @property
    def usable(self) -> list[EngineClient]:
        """The engines that may get requests; asleep ones, too, where they share a card."""
        return [engine for engine in self._engines.values() if self._may_get(engine)]

    def adapters(self, model: str) -> set[str]:
        """Returns the names of the adapters that engines of a model have."""
        return {name for each in self._knowing(model) for name in each.view.adapters}

    def adapter_digest(self, name: str, model: str) -> bytes | None:
        """Returns the digest of an adapter that an engine of a model has; None if none has it."""
        known = (each.view.adapters.get(name) for each in self._knowing(model))
        return next((each.digest for each in known if each is not None), None)

    def lists_adapters(self, model: str) -> bool:
        """Whether an engine of a model is there to say which adapters it has."""
        return any(each.view.lists_adapters for each in self._knowing(model))

    def send(
        self,
        request: EngineRequest,
        sink: TokenSink,
        *,
        model: ModelInfo,
        tried: Collection[EngineClient],
    ) -> tuple[EngineClient, Callable[[], None]]:
        """Sends a request to the best engine that was not tried.

        Args:
            request: the request.
            sink: receives its output.
            model: the model whose tokenizer encoded the prompt; engines with another one are not
                used.
            tried: engines to leave out.

        Returns:
            The engine, and the function that aborts the request.

        Raises:
            EngineUnavailableError: no engine is left, or they serve another model.
            InvalidRequestError: the request is too large to send.
            DeadlineExpiredError: its deadline has passed.
        """
        engines = [each for each in self.usable if each not in tried]
        if not engines:
            raise self.unavailable
        identity = ModelIdentity.of(model)
        engines = [engine for engine in engines if engine.identity == identity]
        if not engines:
            raise EngineUnavailableError("the engines serve another model since")
        if request.adapter:
            name, digest = request.adapter, request.adapter_digest
            engines = [each for each in engines if each.view.has_adapter(name, digest)]
            if not engines:
                raise EngineUnavailableError("no engine has the request's adapter now")
        # If every circuit is open, sparing engines would only refuse all requests.
        usable = [e for e in engines if not e.breaker.wait_s] or engines
        choice = choose(usable, request, self._draw)
        abort = choice.engine.submit(request, sink)
        choice.engine.view.expect(choice.keys, num_blocks=choice.num_missing_blocks)
        return choice.engine, abort

    def _knowing(self, model: str) -> list[EngineClient]:
        """Returns the engines that say which adapters a model has.

        Engines that sleep or drain do if no other one takes requests.
        """
        engines = [each for each in self._engines.values() if each.model_name == model]
        return [each for each in engines if self._may_get(each)] or engines

    def _may_get(self, engine: EngineClient) -> bool:
        """Whether an engine may get requests; one that shares a card refuses them while asleep."""
        if self.swapper is not None:
            return engine.is_connected
        return engine.is_ready

    async def load_adapter(self, name: str, path: str, *, model: str = "") -> None:
        """Has all engines of a model load an adapter; if one refuses, none keeps it.

        Args:
            name: of the adapter.
            path: of its folder, or its name on the hub.
            model: empty for the only one.

        Raises:
            EngineUnavailableError: no engine is ready.
            InvalidRequestError: several models share a card, and none is named.
            FrontendError, EngineFaultError: an engine refuses it, with its reason.
        """
        loaded: list[EngineClient] = []
        try:
            for engine, orders in self._of_model(model, name):
                change = await orders.load(name, path)
                loaded.append(engine)
                engine.view.note(change)
        except BaseException:
            for engine in loaded:
                await _take_back(engine, name)
            raise

    async def remove_adapter(self, name: str) -> None:
        """Has all engines that have an adapter remove it.

        Raises:
            EngineUnavailableError: no engine is ready.
            UnknownModelError: no engine has it.
            FrontendError, EngineFaultError: an engine refuses it, with its reason; others have
                removed it.
        """
        having = [each for each in self._ordered() if name in each[0].view.adapters]
        if not having:
            raise UnknownModelError(f"there is no adapter {name!r}")
        failures = []
        for engine, orders in having:
            try:
                engine.view.note(await orders.remove(name))
            except UnknownModelError:
                engine.view.adapters.pop(name, None)  # it was removed meanwhile
            except (FrontendError, EngineFaultError) as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def _of_model(self, model: str, name: str) -> list[tuple[EngineClient, AdapterOrders]]:
        """Returns the engines of the model of a new adapter, with their orders."""
        engines = self._ordered()
        if self.swapper is not None and not model:
            raise InvalidRequestError("several models share a card: name the adapter's model")
        others = [each for each in engines if model and each[0].model_name != model]
        if len(others) == len(engines):
            raise UnknownModelError(f"the model {model[:128]!r} is not served")
        if any(name in (each.model_name, *each.view.adapters) for each, _ in others):
            raise DuplicateRequestError(f"{name!r} is taken by another model or its adapter")
        return [each for each in engines if each not in others]

    def _ordered(self) -> list[tuple[EngineClient, AdapterOrders]]:
        """Returns the engines that take requests, with their orders."""
        engines = [
            (each, each.adapter_orders) for each in self.usable if each.adapter_orders is not None
        ]
        if not engines:
            raise self.unavailable
        return engines

    async def run(
        self, *, on_model: ModelHandler, on_readiness: Callable[[bool], None]
    ) -> NoReturn:
        """Keeps sessions with all engines open until cancelled."""

        def tell_change(engine: EngineClient) -> None:
            if self.swapper is not None:
                self.swapper.note(engine)
            tell_readiness()

        def tell_readiness() -> None:
            if self.is_ready != self._was_ready:
                self._was_ready = self.is_ready
                on_readiness(self._was_ready)

        async with asyncio.TaskGroup() as tasks:
            if self.swapper is not None:
                await self._addresses.refresh()
                tasks.create_task(self.swapper.run(len(self._addresses.addresses)))
            while True:
                await self._addresses.refresh()
                for address in self._addresses.addresses:
                    if address not in self._tasks:
                        engine = self._engines[address] = self._make_engine(address)
                        running = engine.run(
                            check=self._check, on_model=on_model, on_change=tell_change
                        )
                        self._tasks[address] = tasks.create_task(running)
                self._let_go()
                tell_readiness()
                await asyncio.sleep(self.limits.resolve_interval_s)

    def _make_engine(self, address: EngineAddress) -> EngineClient:
        return EngineClient(
            address,
            frontend_id=self._frontend_id,
            tokenizers=self._tokenizers,
            counts=self.counts,
            max_message_bytes=self.limits.max_message_bytes,
            silence_timeout_s=self.limits.silence_timeout_s,
            tls=self._tls,
        )

    def _let_go(self) -> None:
        """Stops using engines whose address is gone, and removes them once they are idle."""
        current = set(self._addresses.addresses)
        for address, engine in list(self._engines.items()):
            is_gone = address not in current
            if is_gone != engine.is_leaving:
                engine.is_leaving = is_gone
                log.info("engine_leaving" if is_gone else "engine_kept", address=address.target)
            if is_gone and not engine.num_live:
                self._tasks.pop(address).cancel()
                del self._engines[address]

    def _check(self, engine: EngineClient, info: ModelInfo) -> None:
        """Refuses an engine with another model, or one that is already connected."""
        for other in self._engines.values():
            if other is engine or other.info is None or other.identity is None:
                continue
            if other.info.engine_id == info.engine_id:
                raise EngineUnavailableError(f"it is the engine at {other.address.target}")
            if self.swapper is not None:
                if other.info.model == info.model:
                    raise EngineUnavailableError(
                        f"the engine at {other.address.target} has the name {info.model!r}, too; "
                        "--served-model-name gives it another one"
                    )
                continue
            difference = other.identity.difference(ModelIdentity.of(info))
            if difference:
                raise EngineUnavailableError(
                    f"it serves another model than the engines in use: {difference}"
                )


async def _take_back(engine: EngineClient, name: str) -> None:
    """Has an engine remove an adapter that another one refused."""
    try:
        if engine.adapter_orders is not None:
            engine.view.note(await engine.adapter_orders.remove(name))
    except (FrontendError, EngineFaultError) as error:
        log.warning("adapter_not_taken_back", name=name, error=str(error))
