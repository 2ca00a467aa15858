"""Keeps one session with the engine, whatever happens to either side."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import structlog

from protos.engine.v1.engine_pb2 import GetModelInfoRequest
from protos.engine.v1.engine_pb2_grpc import EngineServiceStub
from services.frontend.engine_client.messages import EngineRequest, ModelInfo
from services.frontend.engine_client.session import EngineSession, ReadinessHandler, open_session
from services.frontend.engine_client.token_stream import TokenStream
from services.frontend.engine_client.tokenizer_files import (
    TokenizerFiles,
    fetch_tokenizer_files,
    read_tokenizer_files,
    tokenizer_sha256,
)
from services.frontend.errors import EngineUnavailableError
from services.telemetry.grpc_options import channel_options
from services.telemetry.tls import ClientTls, TlsFilesError, open_channel

CALL_TIMEOUT_S = 5.0
"""Limit of the short calls that precede a session."""
TOKENIZER_TIMEOUT_S = 60.0
FIRST_BACKOFF_S = 0.1
LAST_BACKOFF_S = 1.0

log = structlog.get_logger()

ModelHandler = Callable[[ModelInfo, TokenizerFiles], Awaitable[None]]


class EngineClient:
    """Submits requests to the engine while there is one, and finds it again when it was gone.

    `run` does the work; everything else may be called at any time.
    """

    def __init__(
        self,
        address: str,
        *,
        tokenizer_folder: Path | None = None,
        max_message_bytes: int = 16 * 2**20,
        silence_timeout_s: float = 2.5,
        tls: ClientTls | None = None,
    ) -> None:
        """Connects nowhere yet.

        Args:
            address: the engine, as a gRPC target.
            tokenizer_folder: where the tokenizer's files are; fetched from the engine when None.
            max_message_bytes: largest message sent or taken.
            silence_timeout_s: an engine that says nothing for this long is lost.
            tls: certificates; None speaks plain text.
        """
        self.address = address
        self.frontend_id = f"frontend-{uuid.uuid4().hex[:8]}"
        self._tokenizer_folder = tokenizer_folder
        self._max_message_bytes = max_message_bytes
        self._silence_timeout_s = silence_timeout_s
        self._tls = tls
        self._session: EngineSession | None = None
        self._files: TokenizerFiles = {}
        self._is_ready = False
        self._reason = "it has not answered yet"

    @property
    def is_ready(self) -> bool:
        """Whether the engine takes requests now."""
        return self._is_ready

    @property
    def num_live(self) -> int:
        """Requests that the engine has and that are not over."""
        return 0 if self._session is None else self._session.num_live

    @property
    def unavailable(self) -> EngineUnavailableError:
        """The error that says why there is no engine now."""
        return EngineUnavailableError(f"no engine at {self.address}: {self._reason}")

    def submit(self, request: EngineRequest, *, engine_id: str) -> TokenStream:
        """Sends a request.

        Args:
            request: what to run.
            engine_id: the engine whose tokenizer made the prompt. Another one refuses it.

        Raises:
            EngineUnavailableError: there is no engine now, it is another one, or it is draining.
            InvalidRequestError: the request is too large to send.
        """
        if self._session is None:
            raise self.unavailable
        if self._session.hello.engine_id != engine_id:
            raise EngineUnavailableError("the engine was restarted")
        return self._session.submit(request)

    async def run(self, *, on_model: ModelHandler, on_readiness: ReadinessHandler) -> None:
        """Keeps a session open until cancelled.

        Args:
            on_model: told what each engine serves before its session opens; may refuse it with
                EngineUnavailableError.
            on_readiness: told each change of `is_ready`.
        """
        backoff_s = FIRST_BACKOFF_S
        options = channel_options(self._max_message_bytes)
        while True:
            try:
                # A channel for each session: its certificates are those of now.
                async with open_channel(self.address, options, self._tls) as channel:
                    stub = EngineServiceStub(channel)  # type: ignore[no-untyped-call]  # generated code
                    session = await self._connect(stub, on_model)
                    await self._serve(session, on_readiness)
                    backoff_s = FIRST_BACKOFF_S
            except (EngineUnavailableError, grpc.aio.AioRpcError, TlsFilesError) as error:
                self._note(_reason_of(error))
                backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)
            await asyncio.sleep(backoff_s)

    async def _connect(self, stub: EngineServiceStub, on_model: ModelHandler) -> EngineSession:
        info = await stub.GetModelInfo(
            GetModelInfoRequest(), timeout=CALL_TIMEOUT_S, wait_for_ready=True
        )
        if tokenizer_sha256(self._files) != info.tokenizer_sha256:
            self._files = await self._read_tokenizer(stub, info)
        await on_model(info, self._files)
        session = await open_session(
            stub,
            frontend_id=self.frontend_id,
            max_message_bytes=self._max_message_bytes,
            silence_timeout_s=self._silence_timeout_s,
        )
        if session.hello.engine_id != info.engine_id:
            session.close()
            raise EngineUnavailableError("it was restarted while its model was being read")
        return session

    async def _read_tokenizer(self, stub: EngineServiceStub, info: ModelInfo) -> TokenizerFiles:
        folder = self._tokenizer_folder
        if folder is None:
            files = await fetch_tokenizer_files(stub, timeout_s=TOKENIZER_TIMEOUT_S)
        else:
            files = await asyncio.to_thread(read_tokenizer_files, folder)
        found = tokenizer_sha256(files)
        if found != info.tokenizer_sha256:
            raise EngineUnavailableError(
                f"the tokenizer from {folder or 'the engine'} has the hash {found[:12]}, the"
                f" engine's model needs {info.tokenizer_sha256[:12]}"
            )
        return files

    async def _serve(self, session: EngineSession, on_readiness: ReadinessHandler) -> None:
        def set_ready(ready: bool) -> None:
            if ready != self._is_ready:
                self._is_ready = ready
                on_readiness(ready)

        log.info("engine_connected", address=self.address, engine_id=session.hello.engine_id)
        self._session = session
        try:
            self._note(await session.run(set_ready))
        finally:
            self._session = None
            set_ready(False)

    def _note(self, reason: str) -> None:
        """Remembers why there is no engine, and logs it when that is news."""
        if reason != self._reason:
            self._reason = reason
            log.warning("engine_lost", address=self.address, reason=reason)


def _reason_of(error: EngineUnavailableError | grpc.aio.AioRpcError | TlsFilesError) -> str:
    if not isinstance(error, grpc.aio.AioRpcError):
        return str(error)
    return f"{error.code().name}: {error.details()}"
