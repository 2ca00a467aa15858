"""Builds, serves and shuts down the frontend service."""

import asyncio
import contextlib
import gc
import os
import signal
from functools import partial
from typing import NoReturn

import grpc
import structlog

from protos.frontend.v1 import frontend_pb2, frontend_pb2_grpc
from services.frontend.access.gate import Gate
from services.frontend.access.key_file import KeyFileError
from services.frontend.config import LOOPBACK, FrontendConfig
from services.frontend.engine_client.addresses import AddressBook
from services.frontend.engine_client.pool import EnginePool, PoolLimits
from services.frontend.engine_client.tokenizer_files import TokenizerStore
from services.frontend.http.app import PARSERS
from services.frontend.http.bodies.reader import BodyReader
from services.frontend.http.responses.store import StoreLimits
from services.frontend.http.server import HttpServer
from services.frontend.http.wire.guarded_protocol import ConnectionLimits
from services.frontend.images.limits import ImageLimits
from services.frontend.images.media.fetcher import MediaFetcher
from services.frontend.images.media.urls import MediaHost
from services.frontend.pipeline.image_reading import (
    ImageParts,
    PromptImageLimits,
    open_reader,
)
from services.frontend.pipeline.metrics import FrontendFamilies
from services.frontend.pipeline.pipeline import Pipeline
from services.frontend.pipeline.request_log import RequestLog
from services.frontend.process_group import Share
from services.frontend.reply.reply_format import ReplySettings
from services.frontend.rpc.access import AccessInterceptor
from services.frontend.rpc.operator import OperatorServicer
from services.frontend.rpc.servicer import FrontendServicer
from services.frontend.rpc.session import SessionLimits
from services.frontend.rpc.status import status_of
from services.processes.allocator import return_free_memory
from services.processes.stop_signals import stop_signals
from services.telemetry.loop_lag import LoopLag
from services.telemetry.metrics import FiguresOfProcess, Metrics
from services.telemetry.stacks import show_stacks_on_signal, watch_event_loop
from services.telemetry.tracebacks import log_loop_errors
from services.telemetry.tracing import open_tracing
from services.transport.callers import by_address
from services.transport.connections import Connections
from services.transport.counts import Counts, LocalCounts
from services.transport.grpc_options import ServerLimits
from services.transport.health import Health
from services.transport.hosts import AllowedHosts
from services.transport.message_limits import MessageLimits
from services.transport.server import listen, make_server
from services.transport.shared_counts import SharedCounts
from services.transport.tls import ClientTls, ServerTls, TlsFilesError

log = structlog.get_logger()

SERVICE_NAME = frontend_pb2.DESCRIPTOR.services_by_name["FrontendService"].full_name

TEXT_ROOM_BYTES = 3 * 2**20
"""Text allowed beside a prompt; a field's own limit refuses its text with a clearer error."""
ENGINE_WAIT_S = 5.0
ENGINE_POLL_S = 0.05
"""How long one of several processes waits for an engine before it opens its ports, and how often
it looks."""


class FrontendServer:
    """The frontend service: engine pool, pipeline, servicer, health and reflection on one port.

    Optional HTTP has another port over the same pipeline.
    """

    def __init__(
        self,
        config: FrontendConfig,
        share: Share | None = None,
        *,
        images: ImageParts | None = None,
    ) -> None:
        """Serves nothing until `start`.

        Args:
            config: the configuration.
            share: the part of one of several processes.
            images: the parts that read images; None makes those of the configuration.
        """
        self._config = config
        self._share = share
        self._counts: Counts = (
            LocalCounts() if share is None else SharedCounts(share.counts, share.index)
        )
        self._health = Health(SERVICE_NAME, counts=self._counts)
        self._gate = Gate(config.api_keys_file, counts=self._counts)
        self._hosts = AllowedHosts(config.host, config.host_names)
        self.engine = EnginePool(
            AddressBook(config.engine_addresses),
            TokenizerStore(config.tokenizer),
            PoolLimits.of(config, names_engines=not self._gate.requires_keys),
            tls=ClientTls.from_settings(
                ca=config.engine_tls_ca,
                cert=config.engine_tls_cert,
                key=config.engine_tls_key,
                prefix="--engine-tls",
            ),
        )
        self._tracing = open_tracing(config.otlp_endpoint, service="octavo-frontend")
        self._pipeline = Pipeline(
            self.engine,
            tracing=self._tracing,
            max_prompt_bytes=config.max_prompt_bytes,
            max_samples=config.max_samples,
            num_tokenizer_threads=config.num_tokenizer_threads,
            template_timeout_s=config.template_timeout_s,
            replies=ReplySettings(
                config.reply_format, config.max_reasoning_tokens, config.strict_fields
            ),
            images=images or image_parts(config),
            gate=self._gate,
        )
        self._lag = LoopLag()
        beats = None if share is None else share.beats
        self._metrics = Metrics(
            FrontendFamilies(
                self._pipeline.requests.counts, self.engine, self._lag, self._gate.refused, beats
            ),
            None if share is None else FiguresOfProcess(share.figures, share.index),
        )
        self._is_draining = False
        self._running: asyncio.Task[None] | None = None
        self._watching_keys: asyncio.Task[None] | None = None
        self._watching_lag: asyncio.Task[NoReturn] | None = None
        self._publishing: asyncio.Task[NoReturn] | None = None
        self._returning_memory: asyncio.Task[NoReturn] | None = None
        self._server = make_server(
            SERVICE_NAME,
            health=self._health,
            status_of=status_of,
            max_message_bytes=config.max_message_bytes,
            limits=ServerLimits(
                max_request_bytes=config.max_request_bytes,
                # gRPC counts its connections by itself, in each process.
                max_connections=-(-config.max_connections // config.processes),
                max_streams_per_connection=config.max_streams_per_connection,
                max_sessions=config.max_sessions,
                slow_reader_timeout_s=config.slow_reader_timeout_s,
                shares_port=share is not None,
                message=MessageLimits(max_text_bytes=config.max_prompt_bytes + TEXT_ROOM_BYTES),
            ),
            counts=self._counts,
            party=self._party,
            interceptors=[AccessInterceptor(self._gate)] if self._gate.requires_keys else [],
        )
        self._servicer = FrontendServicer(
            self._pipeline,
            counts=self._counts,
            slow_reader_timeout_s=config.slow_reader_timeout_s,
            session_limits=SessionLimits(
                max_live_requests=config.max_live_requests,
                max_prompt_bytes=config.max_prompt_bytes,
                idle_timeout_s=config.session_idle_timeout_s,
            ),
        )
        frontend_pb2_grpc.add_FrontendServiceServicer_to_server(  # type: ignore[no-untyped-call]  # generated
            self._servicer, self._server
        )
        if config.allow_lora_updates:
            OperatorServicer(self._pipeline).add_to(self._server)
        self._http = HttpServer(
            self._pipeline,
            self._metrics,
            body_reader=BodyReader(
                PARSERS,
                max_prompt_bytes=config.max_prompt_bytes,
                max_samples=config.max_samples,
                counts=self._counts,
                strict_fields=config.strict_fields,
            ),
            counts=self._counts,
            connections=Connections(
                self._counts,
                "http/connections",
                limit=config.max_connections,
                limit_per_address=config.max_connections_per_address,
            ),
            limits=ConnectionLimits(
                header_timeout_s=config.http_header_timeout_s,
                slow_reader_timeout_s=config.slow_reader_timeout_s,
                max_body_bytes=config.max_message_bytes,
            ),
            store_limits=StoreLimits(
                # A client's next connection may reach another process, which has another memory.
                max_responses=config.max_stored_responses if share is None else 0,
                max_bytes=config.max_stored_response_bytes,
                max_age_s=config.max_stored_response_age_s,
                # JSON escapes make text up to six times longer.
                max_conversation_bytes=6 * config.max_prompt_bytes,
                # As much as a request can bring itself.
                max_conversation_image_bytes=config.max_message_bytes,
            ),
            max_live_requests=config.max_live_requests,
            cors_origins=config.cors_origins.split(",") if config.cors_origins else (),
            beats=beats,
            # A page of another host has no key.
            hosts=self._hosts if config.host_names or not self._gate.requires_keys else None,
            changes_adapters=config.allow_lora_updates,
            allows_sleep=config.allow_sleep,
        )
        self.http_port: int | None = None
        """The HTTP port; None without HTTP and before `start`."""

    @property
    def requests(self) -> RequestLog:
        """Records every request."""
        return self._pipeline.requests

    async def start(self) -> int:
        """Opens the ports, connects to engines in the background, and returns the gRPC port.

        Raises:
            OSError: the address cannot be listened on.
            TlsFilesError: the certificates cannot be used.
        """
        config = self._config
        tls = ServerTls.from_settings(
            cert=config.tls_cert, key=config.tls_key, client_ca=config.tls_client_ca
        )
        self._running = asyncio.create_task(
            self.engine.run(on_model=self._pipeline.models.load, on_readiness=self._take_readiness)
        )
        if self._share is not None:
            await self._wait_for_engine()
        port = listen(self._server, config.host, config.port, tls)
        if config.metrics_port is not None and (self._share is None or self._share.is_first):
            self._metrics.serve(
                config.host, config.metrics_port, tls, self._hosts, self._gate.refused
            )
        await self._server.start()
        if config.http_port is not None:
            self.http_port = self._http.start(
                config.host, config.http_port, tls, shares_port=self._share is not None
            )
        self._watching_keys = asyncio.create_task(self._gate.watch())
        self._watching_lag = asyncio.create_task(self._lag.watch())
        self._publishing = asyncio.create_task(self._metrics.publish())
        self._returning_memory = asyncio.create_task(return_free_memory())
        if self._gate.requires_keys and tls is None and config.host not in LOOPBACK:
            log.warning("api_keys_in_plain_text", host=config.host)
        log.info(
            "frontend_listening",
            address=f"{config.host}:{port}",
            port=port,
            tls=tls is not None,
            api_keys=self._gate.requires_keys,
        )
        return port

    async def wait(self) -> int:
        """Serves until SIGTERM, SIGINT or SIGHUP and returns the process's exit status."""
        assert self._running is not None, "start comes first"
        loop = asyncio.get_running_loop()
        stopping = asyncio.Event()

        signals = stop_signals()

        def take_signal(number: signal.Signals) -> None:
            for each in signals:  # the next signal, of either kind, ends the process at once
                loop.remove_signal_handler(each)
                signal.signal(each, signal.SIG_DFL)
            log.info("signal_received", signal=number.name)
            stopping.set()

        for number in signals:
            loop.add_signal_handler(number, take_signal, number)
        waiting = asyncio.create_task(stopping.wait())
        await asyncio.wait({waiting, self._running}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():  # the engine pool never ends by itself
            waiting.cancel()
            log.error("engine_pool_failed", exc_info=self._running.exception())
            return 1
        return 0

    def begin_drain(self) -> None:
        """Reports NOT_SERVING and lets sessions refuse new requests."""
        self._is_draining = True
        self._health.set_ready(False)
        self._servicer.drain()
        self._http.begin_drain()

    async def drain(self) -> None:
        """Refuses new requests and waits for running ones, up to the configured time."""
        self.begin_drain()
        self._health.close()
        timeout_s = self._config.drain_timeout_s
        await asyncio.gather(self._server.stop(timeout_s), self._http.drain(timeout_s))

    async def close(self) -> None:
        """Ends everything that still runs."""
        await asyncio.gather(self._server.stop(None), self._http.close())
        watching = (
            self._running,
            self._watching_keys,
            self._watching_lag,
            self._publishing,
            self._returning_memory,
        )
        tasks = [task for task in watching if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._pipeline.close()
        await asyncio.to_thread(self._metrics.close)
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)

    async def _wait_for_engine(self) -> None:
        """Waits before callers come, whom other processes serve meanwhile; not for long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ENGINE_WAIT_S):
                while not self._health.is_ready:  # noqa: ASYNC110  nothing else waits for it
                    await asyncio.sleep(ENGINE_POLL_S)

    def _party(self, context: grpc.aio.ServicerContext) -> str:
        """Names a caller by its key, or by its address without keys."""
        name = self._gate.acting_name
        return by_address(context) if name is None else f"key/{name}"

    def _take_readiness(self, ready: bool) -> None:
        self._health.set_ready(ready and not self._is_draining)


def image_parts(config: FrontendConfig) -> ImageParts:
    """Returns the parts that read images as the configuration says."""
    limits = ImageLimits(max_pixels=config.max_image_pixels)
    hosts = [MediaHost.parse(name) for name in config.media_host_names]
    return ImageParts(
        limits=PromptImageLimits(
            max_per_request=config.max_images_per_request,
            max_pixels_per_request=config.max_pixels_per_request,
            image=limits,
            max_held_bytes=config.max_image_memory_bytes,
            max_cached_bytes=config.image_cache_bytes,
        ),
        open_reader=partial(
            open_reader,
            num_processes=config.num_image_processes
            or max(1, (os.cpu_count() or 1) // config.processes),
            limits=limits,
        ),
        # To load the certificates of authorities takes a while.
        fetcher=MediaFetcher(hosts, max_bytes=limits.max_bytes) if hosts else None,
    )


async def serve(config: FrontendConfig, share: Share | None = None) -> int:
    """Serves until SIGTERM, SIGINT or SIGHUP and returns the process's exit status."""
    if share is None:
        return await _serve(config, None)
    beating = asyncio.create_task(share.beats.keep(share.index))
    try:
        return await _serve(config, share)
    finally:
        beating.cancel()


async def _serve(config: FrontendConfig, share: Share | None) -> int:
    server = None
    try:
        server = FrontendServer(config, share)
        await server.start()
    except (OSError, TlsFilesError, KeyFileError) as error:
        if server is not None:
            await server.close()
        # Last: until it is closed, it may log that it reaches no engine.
        log.error("frontend_start_failed", error=str(error))  # noqa: TRY400  the reason is enough
        return 1
    log_loop_errors()
    gc.freeze()  # everything loaded so far lives as long as the process
    show_stacks_on_signal()
    watching = asyncio.create_task(watch_event_loop())
    try:
        exit_status = await server.wait()
        await server.drain()
    finally:
        await server.close()
        watching.cancel()
    log.info("frontend_stopped", exit_status=exit_status)
    return exit_status
