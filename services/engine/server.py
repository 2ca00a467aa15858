"""Builds, serves and stops the engine service."""

import asyncio
import gc
import signal
from collections.abc import Callable
from typing import NoReturn

import grpc
import structlog

from protos.engine.v1 import engine_pb2, engine_pb2_grpc
from services.engine.checkpoint.model_folder import ModelFolder
from services.engine.config.engine_config import EngineConfig
from services.engine.config.serving import ServingConfig
from services.engine.core.engine_core import EngineCore
from services.engine.core.worker_supervisor import Executor
from services.engine.edge.edge import Edge
from services.engine.edge.node_secret import NodeSecretError
from services.engine.edge.open_streams import OpenStreams
from services.engine.edge.request_reader import RequestReader
from services.engine.edge.status import status_of
from services.engine.grammar.compiler import GrammarCompiler
from services.engine.limits import StepLimits
from services.engine.openengine.servicer import OpenEngineServicer
from services.engine.patch_memory import PatchMemory
from services.engine.rpc.known_clients import KnownClients
from services.engine.rpc.metrics import EngineFamilies
from services.engine.rpc.nodes import NodeServicer
from services.engine.rpc.operator import OperatorServicer
from services.engine.rpc.servicer import EngineServicer
from services.engine.worker.rank_process import WorkerDiedError
from services.engine.worker.remote_ranks import JoinedNodes
from services.processes.stop_signals import stop_signals
from services.telemetry.loop_lag import LoopLag
from services.telemetry.metrics import Metrics
from services.telemetry.stacks import show_stacks_on_signal, watch_event_loop
from services.telemetry.tracebacks import log_loop_errors
from services.telemetry.tracing import open_tracing
from services.transport.counts import LocalCounts
from services.transport.grpc_options import ServerLimits
from services.transport.health import Health
from services.transport.message_limits import MessageLimits
from services.transport.refused_calls import RefusedCalls
from services.transport.server import listen, make_server
from services.transport.tls import ServerTls, TlsFilesError

log = structlog.get_logger()

SERVICE_NAME = engine_pb2.DESCRIPTOR.services_by_name["EngineService"].full_name
VLLM_SERVICE_NAME = "vllm.grpc.engine.VllmEngine"
OPENENGINE_SERVICE_NAMES = ("openengine.v1.Inference", "openengine.v1.Control")
TEXT_ROOM_BYTES = 4 * 2**20
"""Text that a message may have beside a grammar; fields have limits of their own."""
PACKED_ROOM_BYTES = 2**20
"""Packed numbers that a message may have beside a prompt of the context's length."""
STOP_GRACE_S = 1.0
"""Time that calls have to end by themselves once the engine has drained."""
FAULT_GRACE_S = 0.2
"""Time for the answers to calls that wait for a worker which cannot start."""


class EngineServer:
    """The engine service: core, servicer, health and reflection behind one port."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelFolder,
        make_executor: Callable[[], Executor],
        nodes: JoinedNodes | None = None,
        patch_memory: PatchMemory | None = None,
    ) -> None:
        """Builds a service that does not listen yet.

        Args:
            config: its settings.
            model: what it serves.
            make_executor: makes the executor of the next workers.
            nodes: gets the hosts that join; None where there is one host.
            patch_memory: holds images where the workers of the executors read them.

        Raises:
            TlsFilesError, NodeSecretError: a file cannot be used.
        """
        self._config = config
        self._counts = LocalCounts()
        self._refused = refused = RefusedCalls(self._counts)
        self._health = Health(
            SERVICE_NAME,
            *((VLLM_SERVICE_NAME,) if config.serving.vllm_grpc else ()),
            *(OPENENGINE_SERVICE_NAMES if config.serving.openengine_grpc else ()),
            counts=self._counts,
        )
        self._tracing = open_tracing(config.observability.otlp_endpoint, service="octavo-engine")
        self.core = EngineCore(
            config,
            limits=StepLimits.of(
                config,
                max_model_len=model.max_model_len,
                vocab_size=model.vocab_size,
                cache_windows=model.config.entry_windows(
                    with_draft_layers=config.speculation.num_layer_drafts > 0
                ),
                cache_spans=model.config.cache_spans,
                sees_images=model.image_input is not None,
                max_whole_tokens=model.config.max_whole_tokens,
                computes_whole_prompts=model.config.sees_later,
                pooling=None if model.pooling is None else model.pooling.method,
            ),
            make_executor=make_executor,
            on_readiness=self._health.set_ready,
            tracing=self._tracing,
        )
        self._grammars = GrammarCompiler(
            model.tokenizer_json,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            max_live=config.grammar.max_structured_requests,
            timeout_s=config.grammar.grammar_timeout_s,
            num_threads=config.grammar.num_grammar_threads,
            counts=self._counts,
        )
        self._nodes = nodes
        self._exit_status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._tasks: list[asyncio.Task[None]] = []
        self._server = make_server(
            SERVICE_NAME,
            health=self._health,
            status_of=status_of,
            max_message_bytes=config.serving.max_message_bytes,
            limits=_server_limits(config, model),
            counts=self._counts,
            interceptors=_interceptors(config.serving, refused),
        )
        streams = OpenStreams(self._counts)
        reader = RequestReader(
            model,
            max_grammar_bytes=config.grammar.max_grammar_bytes,
            adapters=self.core.adapters,
            patch_memory=patch_memory,
        )
        edge = Edge(self.core, model, config, self._grammars, streams, reader)
        servicer = EngineServicer(edge)
        engine_pb2_grpc.add_EngineServiceServicer_to_server(servicer, self._server)  # type: ignore[no-untyped-call]  # generated
        if config.serving.vllm_grpc:
            # Its stubs are an optional extra.
            from services.engine.vllm.servicer import VllmServicer

            VllmServicer(edge).add_to(self._server)
        if config.serving.openengine_grpc:
            OpenEngineServicer(edge).add_to(self._server)
        has_weights = config.weights.weights_folder is not None
        if config.adapters.max_loras or has_weights or config.worker.enable_sleep:
            OperatorServicer(self.core, config.serving).add_to(self._server)
        if nodes is not None:
            NodeServicer(nodes, config.parallel, refused).add_to(self._server)
        self._lag = LoopLag()
        self._metrics = Metrics(
            EngineFamilies(
                self.core,
                model=model.name,
                num_sessions=lambda: servicer.num_sessions,
                lag=self._lag,
                refused=refused,
            )
        )

    async def start(self) -> int:
        """Opens the port, starts the worker in the background, and returns the port.

        Raises:
            OSError: the address cannot be listened on.
            TlsFilesError: the certificates cannot be used.
        """
        serving, metrics_port = self._config.serving, self._config.observability.metrics_port
        tls = ServerTls.from_settings(
            cert=serving.tls_cert, key=serving.tls_key, client_ca=serving.tls_client_ca
        )
        port = listen(self._server, serving.host, serving.port, tls)
        if metrics_port is not None:
            self._metrics.serve(serving.host, metrics_port, tls, refused=self._refused)
        await self._server.start()
        running = asyncio.create_task(self.core.run())
        running.add_done_callback(self._end_core)
        self._tasks += [
            running,
            asyncio.create_task(self._lag.watch()),
            asyncio.create_task(self._exit_when_drained()),
        ]
        self._grammars.load()
        log.info(
            "engine_listening", address=f"{serving.host}:{port}", port=port, tls=tls is not None
        )
        return port

    def stop_on_signals(self) -> None:
        """Lets SIGTERM, SIGINT and SIGHUP drain the engine, and a second one end it at once."""
        loop = asyncio.get_running_loop()
        for number in stop_signals():
            loop.add_signal_handler(number, self._take_signal, number)

    async def wait(self) -> int:
        """Waits until the engine has drained or fails; returns the exit status."""
        return await self._exit_status

    async def stop(self) -> None:
        """Ends calls, port and worker; after a drain, calls get time to finish."""
        self._health.set_ready(False)
        self._health.close()
        self.core.watchers.close()
        if self._nodes is not None:
            self._nodes.close()
        has_ended = self._exit_status.done()
        has_drained = has_ended and self._exit_status.result() == 0
        grace_s = STOP_GRACE_S if has_drained else FAULT_GRACE_S if has_ended else None
        await self._server.stop(grace_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._grammars.close()
        await asyncio.to_thread(self._metrics.close)
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)

    def _end_core(self, running: asyncio.Task[NoReturn]) -> None:
        if running.cancelled():
            return
        error = running.exception()
        if isinstance(error, WorkerDiedError):
            log.error("engine_start_failed", error=str(error))
        else:
            log.error("engine_failed", exc_info=error)
        self._exit(1)

    async def _exit_when_drained(self) -> None:
        await self.core.drain.wait_until_over()
        self._exit(0)

    def _take_signal(self, number: signal.Signals) -> None:
        log.info("signal_received", signal=number.name)
        if self.core.drain.has_begun:
            self._exit(1)
        else:
            self._tasks.append(asyncio.create_task(self._drain()))

    async def _drain(self) -> None:
        await self.core.drain.run(self._config.serving.drain_timeout_s)

    def _exit(self, status: int) -> None:
        if not self._exit_status.done():
            self._exit_status.set_result(status)


async def serve(
    config: EngineConfig,
    model: ModelFolder,
    make_executor: Callable[[], Executor],
    nodes: JoinedNodes | None = None,
    patch_memory: PatchMemory | None = None,
) -> int:
    """Serves until a Drain call or a stop signal, and returns the process's exit status."""
    try:
        server = EngineServer(config, model, make_executor, nodes, patch_memory)
        await server.start()
    except (OSError, TlsFilesError, NodeSecretError) as error:
        log.error("engine_start_failed", error=str(error))  # noqa: TRY400  the reason is enough
        return 1
    log_loop_errors()
    server.stop_on_signals()
    show_stacks_on_signal()
    watching = asyncio.create_task(watch_event_loop())
    collect_garbage_rarely()
    try:
        exit_status = await server.wait()
    finally:
        await server.stop()
        watching.cancel()
    log.info("engine_stopped", exit_status=exit_status)
    return exit_status


def _server_limits(config: EngineConfig, model: ModelFolder) -> ServerLimits:
    serving = config.serving
    return ServerLimits(
        max_request_bytes=serving.max_message_bytes,
        max_connections=serving.max_connections,
        max_streams_per_connection=serving.max_streams_per_connection,
        max_sessions=serving.max_sessions,
        slow_reader_timeout_s=serving.slow_reader_timeout_s,
        message=MessageLimits(
            max_text_bytes=config.grammar.max_grammar_bytes + TEXT_ROOM_BYTES,
            # Varints of at most five bytes each.
            max_packed_bytes=5 * model.max_model_len + PACKED_ROOM_BYTES,
        ),
    )


def _interceptors(config: ServingConfig, refused: RefusedCalls) -> list[grpc.aio.ServerInterceptor]:
    """Returns the interceptors of every call.

    Raises:
        TlsFilesError: names are required of clients without certificates.
    """
    if not config.tls_allowed_clients:
        return []
    if config.tls_client_ca is None:
        raise TlsFilesError("--tls-allowed-clients needs --tls-client-ca")
    return [KnownClients(config.tls_allowed_clients, refused)]


def collect_garbage_rarely() -> None:
    """Makes garbage collections rare and short, once everything is loaded."""
    # Loaded objects live as long as the process, so no collection needs to walk them again.
    gc.freeze()
    # A full collection walks the token lists of every live request: with 1024 of them at 4096
    # tokens, p99 of a step's scheduling was 70 ms at Python's thresholds and is 3 ms at these.
    gc.set_threshold(100_000, 20, 100)
