"""Keeps one session open with one engine."""

import asyncio
from collections.abc import Awaitable, Callable

import grpc
import structlog

from protos.common.v1.request_story_pb2 import RequestStory
from protos.engine.v1.engine_pb2 import ExplainRequestRequest, GetModelInfoRequest
from protos.engine.v1.engine_pb2_grpc import EngineServiceStub
from services.frontend.engine_client.adapter_orders import AdapterOrders
from services.frontend.engine_client.addresses import EngineAddress
from services.frontend.engine_client.circuit_breaker import CircuitBreaker
from services.frontend.engine_client.engine_view import EngineView
from services.frontend.engine_client.messages import EngineRequest, ModelInfo, TokenSink
from services.frontend.engine_client.model_identity import ModelIdentity
from services.frontend.engine_client.prefix_keys import PREFIX_KEY_VERSION
from services.frontend.engine_client.routing_counts import RoutingCounts
from services.frontend.engine_client.session import EngineSession
from services.frontend.engine_client.session_opening import open_session
from services.frontend.engine_client.sleep_orders import SleepOrders
from services.frontend.engine_client.tokenizer_files import TokenizerFiles, TokenizerStore
from services.frontend.errors import EngineUnavailableError
from services.transport.grpc_options import channel_options
from services.transport.interceptors import internal_status
from services.transport.tls import ClientTls, TlsFilesError, open_channel

CALL_TIMEOUT_S = 5.0
"""Limit of each short call before a session."""
FIRST_BACKOFF_S = 0.1
LAST_BACKOFF_S = 1.0

log = structlog.get_logger()

ModelHandler = Callable[[ModelInfo, TokenizerFiles], Awaitable[None]]
"""Handles the model of an engine before its session opens; refuses it with EngineUnavailableError.
"""
AdmissionCheck = Callable[["EngineClient", ModelInfo], None]
"""Refuses an engine with EngineUnavailableError before its tokenizer is read."""


class EngineClient:
    """Submits requests to one engine, and reconnects after losing it.

    `run` keeps the session; all other methods may be called at any time.
    """

    def __init__(
        self,
        address: EngineAddress,
        *,
        frontend_id: str,
        tokenizers: TokenizerStore,
        counts: RoutingCounts,
        max_message_bytes: int,
        silence_timeout_s: float,
        tls: ClientTls | None = None,
    ) -> None:
        """Connects nowhere yet."""
        self.address = address
        self.breaker = CircuitBreaker(address.target)
        self.info: ModelInfo | None = None
        """The served model; None without a connection."""
        self.identity: ModelIdentity | None = None
        """The part of `info` in which engines must agree."""
        self.is_leaving = False
        """Set to send no new requests; running ones may finish."""
        self._frontend_id = frontend_id
        self._tokenizers = tokenizers
        self._counts = counts
        self._max_message_bytes = max_message_bytes
        self._silence_timeout_s = silence_timeout_s
        self._tls = tls
        self.adapter_orders: AdapterOrders | None = None
        """Orders about the engine's adapters; None without a connection."""
        self.sleep_orders: SleepOrders | None = None
        """Orders about the engine's sleep; None without a connection."""
        self._session: EngineSession | None = None
        self._stub: EngineServiceStub | None = None
        self._is_ready = False
        self._reason = "it has not answered yet"

    @property
    def is_ready(self) -> bool:
        """Whether the engine accepts requests now."""
        return self._is_ready and not self.is_leaving

    @property
    def is_connected(self) -> bool:
        """Whether there is a session."""
        return self._session is not None

    @property
    def model_name(self) -> str:
        """The name of the served model; empty without a connection."""
        return "" if self.info is None else self.info.model

    @property
    def is_asleep(self) -> bool:
        """Whether the last heartbeat said that the engine sleeps."""
        return self.view.heartbeat.asleep

    @property
    def num_live(self) -> int:
        """Unfinished requests at the engine."""
        return 0 if self._session is None else self._session.num_live

    @property
    def view(self) -> EngineView:
        """The engine's load and cached prefixes; empty without a connection."""
        return EngineView() if self._session is None else self._session.view

    @property
    def reason(self) -> str:
        """Why the engine gets no requests now; empty if it does."""
        if self.is_leaving:
            return "its address is gone"
        if self._session is None:
            return self._reason
        if self.is_asleep:
            return "it is asleep"
        if not self._is_ready:
            return "it is draining" if self._session.is_draining else "it is not ready"
        return "it failed requests and is spared for a while" if self.breaker.is_open else ""

    def submit(self, request: EngineRequest, sink: TokenSink) -> Callable[[], None]:
        """Sends a request, whose output goes to `sink`; returns the function that aborts it."""
        if self._session is None:
            raise EngineUnavailableError(f"no engine at {self.address.target}: {self._reason}")
        abort = self._session.submit(request, sink)
        self.breaker.note_sent()
        return abort

    async def explain(self, request_id: str) -> RequestStory:
        """Returns where the time of a request went.

        Raises:
            EngineUnavailableError: the engine cannot be asked, or does not remember the request.
        """
        if self._stub is None:
            raise EngineUnavailableError(self._reason)
        request = ExplainRequestRequest(request_id=request_id)
        try:
            response = await self._stub.ExplainRequest(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise EngineUnavailableError(_reason_of(error)) from None
        story: RequestStory = response.story
        return story

    async def run(
        self,
        *,
        check: AdmissionCheck,
        on_model: ModelHandler,
        on_change: Callable[["EngineClient"], None],
    ) -> None:
        """Keeps a session open until cancelled; `on_change` is called at each change."""
        backoff_s = FIRST_BACKOFF_S
        options = channel_options(
            self._max_message_bytes, silence_timeout_s=self._silence_timeout_s
        )
        if self.address.authority is not None:
            options.append(("grpc.default_authority", self.address.authority))
        while True:
            try:
                # One channel per session: it reads the current certificates.
                async with open_channel(self.address.target, options, self._tls) as channel:
                    stub = EngineServiceStub(channel)  # type: ignore[no-untyped-call]  # generated code
                    session = await self._connect(stub, check, on_model)
                    self._stub = stub
                    self.adapter_orders = AdapterOrders(channel)
                    self.sleep_orders = SleepOrders(channel)
                    await self._serve(session, on_change)
                    backoff_s = FIRST_BACKOFF_S
            except (EngineUnavailableError, grpc.aio.AioRpcError, TlsFilesError) as error:
                self._note("engine_not_used", _reason_of(error))
                backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)
            except Exception as error:  # noqa: BLE001  it costs a session, not the other engines
                self._note("engine_not_used", internal_status(error).message)
                backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)
            finally:
                self.info = self.identity = self._stub = None
                self.adapter_orders = self.sleep_orders = None
            await asyncio.sleep(backoff_s)

    async def _connect(
        self, stub: EngineServiceStub, check: AdmissionCheck, on_model: ModelHandler
    ) -> EngineSession:
        # A call that waits for a connection ends at its deadline, and hides why there was none.
        info = await stub.GetModelInfo(GetModelInfoRequest(), timeout=CALL_TIMEOUT_S)
        check(self, info)
        # From here on, other engines must serve the same model.
        self.info, self.identity = info, ModelIdentity.of(info)
        await on_model(info, await self._tokenizers.read(stub, info.tokenizer_sha256))
        session = await open_session(
            stub,
            frontend_id=self._frontend_id,
            breaker=self.breaker,
            max_message_bytes=self._max_message_bytes,
            max_image_bytes=info.image_processor.max_image_bytes,
            counts=self._counts,
            silence_timeout_s=self._silence_timeout_s,
            wants_prefixes=self._shares_prefix_keys(info),
        )
        if session.hello.engine_id != info.engine_id:
            session.close()
            raise EngineUnavailableError("it was restarted while its model was being read")
        return session

    def _shares_prefix_keys(self, info: ModelInfo) -> bool:
        """Whether the engine has the same prefix keys; others' cached prefixes are ignored."""
        version = info.prefix_key_version or 1
        if version != PREFIX_KEY_VERSION:
            log.warning(
                "engine_prefixes_ignored",
                address=self.address.target,
                engine_key_version=version,
                frontend_key_version=PREFIX_KEY_VERSION,
            )
        return version == PREFIX_KEY_VERSION

    async def _serve(
        self, session: EngineSession, on_change: Callable[["EngineClient"], None]
    ) -> None:
        def set_ready(ready: bool) -> None:
            if ready != self._is_ready:
                self._is_ready = ready
                on_change(self)

        log.info("engine_connected", address=self.address.target, engine_id=session.hello.engine_id)
        self._session = session
        on_change(self)
        try:
            self._note("engine_lost", await session.run(set_ready))
        finally:
            self._session, self._is_ready = None, False
            on_change(self)

    def _note(self, event: str, reason: str) -> None:
        """Remembers why there is no engine, and logs a new reason."""
        if reason != self._reason:
            self._reason = reason
            log.warning(event, address=self.address.target, reason=reason)


def _reason_of(error: EngineUnavailableError | grpc.aio.AioRpcError | TlsFilesError) -> str:
    if not isinstance(error, grpc.aio.AioRpcError):
        return str(error)
    reason = f"{error.code().name}: {error.details()}"
    is_foreign = error.code() == grpc.StatusCode.UNIMPLEMENTED
    return f"it is no engine of this version: {reason}" if is_foreign else reason
