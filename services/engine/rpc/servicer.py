"""The methods of EngineService."""

import asyncio
from collections.abc import AsyncIterator

import grpc

from protos.engine.v1.engine_pb2 import (
    DrainRequest,
    DrainResponse,
    EngineMessage,
    ExplainRequestRequest,
    ExplainRequestResponse,
    FrontendMessage,
    GenerateRequest,
    GenerateResponse,
    GetModelInfoRequest,
    GetModelInfoResponse,
    GetStatsRequest,
    GetStatsResponse,
    GetTokenizerRequest,
    GetTokenizerResponse,
    ImageProcessor,
    StartProfileRequest,
    StartProfileResponse,
    StopProfileRequest,
    StopProfileResponse,
    WatchStepsRequest,
    WatchStepsResponse,
)
from protos.engine.v1.engine_pb2_grpc import EngineServiceServicer
from protos.engine.v1.kv_events_pb2 import SubscribeKvEventsRequest
from protos.engine.v1.recording_pb2 import EngineSettings
from services.engine.checkpoint.model_folder import ModelFolder
from services.engine.config.engine_config import EngineConfig
from services.engine.core.engine_core import EngineCore
from services.engine.core.watchers import StepWatcher
from services.engine.edge.kv_events import follow
from services.engine.edge.open_streams import (
    KV_EVENTS,
    TOKENIZER,
    WATCH,
    OpenStreams,
    write_in_time,
)
from services.engine.edge.request_reader import RequestReader, check_known
from services.engine.errors import NotPermittedError
from services.engine.grammar.compiler import GrammarCompiler
from services.engine.kv_cache.prefix_index import PREFIX_KEY_VERSION
from services.engine.patch_memory import PatchMemory
from services.engine.rpc.explain import explain
from services.engine.rpc.kv_events import part_to_proto
from services.engine.rpc.pooling import pooling_to_proto
from services.engine.rpc.recording import engine_settings, opening, recorded_image
from services.engine.rpc.session import Session
from services.engine.rpc.single import SingleCall
from services.engine.rpc.stats import stats_to_proto
from services.transport.message_reader import RefusedMessage

TOKENIZER_PART_BYTES = 2**18
"""Bytes of a tokenizer file in one message."""


class EngineServicer(EngineServiceServicer):
    """The methods of EngineService; the interceptor maps the errors that they raise."""

    def __init__(
        self,
        core: EngineCore,
        model: ModelFolder,
        config: EngineConfig,
        grammars: GrammarCompiler,
        streams: OpenStreams,
        patch_memory: PatchMemory | None,
    ) -> None:
        self._streams = streams
        self._core = core
        self._model = model
        self._config = config
        self._reader = RequestReader(
            model,
            max_grammar_bytes=config.grammar.max_grammar_bytes,
            adapters=core.adapters,
            patch_memory=patch_memory,
        )
        self._grammars = grammars
        self._num_sessions = 0

    @property
    def num_sessions(self) -> int:
        """Frontends connected now."""
        return self._num_sessions

    async def Session(  # noqa: N802  the protocol's name
        self,
        messages: AsyncIterator[FrontendMessage | RefusedMessage],
        context: "grpc.aio.ServicerContext[FrontendMessage, EngineMessage]",
    ) -> None:
        """Serves one frontend over one stream."""
        self._num_sessions += 1
        try:
            session = Session(
                self._core, self._reader, self._config.serving, context, self._grammars, messages
            )
            await session.run()
        finally:
            self._num_sessions -= 1

    async def Generate(  # noqa: N802  the protocol's name
        self,
        request: GenerateRequest,
        context: "grpc.aio.ServicerContext[GenerateRequest, GenerateResponse]",
    ) -> None:
        """Serves one request over one call."""
        await SingleCall(
            self._core, self._reader, self._config.serving, context, self._grammars
        ).run(request)

    async def GetModelInfo(  # noqa: N802  the protocol's name
        self, request: GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> GetModelInfoResponse:
        """Returns the model and its limits."""
        del context
        check_known(request)
        model, worker = self._model, self._core.worker
        info = GetModelInfoResponse(
            model=model.name,
            architecture=model.architecture,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            eos_token_ids=sorted(model.eos_token_ids),
            default_sampling=self._reader.default_sampling(),
            tokenizer_sha256=model.tokenizer.sha256,
            engine_id=self._core.engine_id,
            block_size=self._config.cache.block_size,
            config_sha256=model.config_sha256,
            prefix_key_version=PREFIX_KEY_VERSION,
            max_running=self._config.max_running,
            weights_version=self._core.weights.version,
        )
        if model.pooling is not None:
            info.pooling.CopyFrom(pooling_to_proto(model.pooling, model))
        if (images := model.image_input) is not None:
            info.image_processor.CopyFrom(
                ImageProcessor(
                    kind=images.kind,
                    settings=images.settings,
                    image_token_id=images.token_id,
                    template_token_id=images.template_token_id,
                    text_around=images.text_around,
                    max_patches=images.max_patches,
                    max_image_bytes=images.max_bytes,
                )
            )
        if worker is not None:
            info.num_blocks = self._core.num_blocks
            info.device_name = worker.device_name
            info.dtype = worker.dtype
            info.num_parameters = worker.num_parameters
        return info

    async def GetTokenizer(  # noqa: N802  the protocol's name
        self, request: GetTokenizerRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Sends the tokenizer's files."""
        check_known(request)
        with self._streams.hold(TOKENIZER, context):
            for file in self._model.tokenizer.files:
                for start in range(0, max(len(file.content), 1), TOKENIZER_PART_BYTES):
                    part = file.content[start : start + TOKENIZER_PART_BYTES]
                    response = GetTokenizerResponse(file_name=file.name, content=part)
                    await write_in_time(
                        context, response, self._config.serving.slow_reader_timeout_s
                    )

    async def GetStats(  # noqa: N802  the protocol's name
        self, request: GetStatsRequest, context: grpc.aio.ServicerContext
    ) -> GetStatsResponse:
        """Returns counts and the present load."""
        del context
        check_known(request)
        core = self._core
        # Capture sizes are planned for steps of one query token a request, or of prompts.
        is_speculative = self._config.speculation.num_speculative_tokens > 0
        has_step_sizes = request.include_step_sizes and not is_speculative
        stats = stats_to_proto(
            core.stats(),
            num_sessions=self._num_sessions,
            step_sizes=core.history.steps if has_step_sizes else None,
            weights=core.worker.weights if core.worker is not None else (),
            weights_version=core.weights.version,
            experts=await core.expert_figures() if request.include_experts else (),
        )
        stats.num_tasks = len(asyncio.all_tasks())
        return stats

    async def WatchSteps(  # noqa: N802  the protocol's name
        self, request: WatchStepsRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Streams every step from now on."""
        check_known(request)
        wants_tokens = request.include_token_ids or request.include_snapshot
        if wants_tokens and not self._config.serving.allow_watch_tokens:
            raise NotPermittedError(
                "token ids are not shown; the engine lacks --allow-watch-tokens"
            )
        with self._streams.hold(WATCH, context):
            watcher = self._core.watch(
                include_token_ids=request.include_token_ids,
                include_snapshot=request.include_snapshot,
            )
            try:
                # From here on, the watcher sees every step that it causes.
                await context.send_initial_metadata(())
                async for response in self._watched(watcher, request):
                    await write_in_time(
                        context, response, self._config.serving.slow_reader_timeout_s
                    )
            finally:
                self._core.watchers.remove(watcher)

    async def ExplainRequest(  # noqa: N802  the protocol's name
        self, request: ExplainRequestRequest, context: grpc.aio.ServicerContext
    ) -> ExplainRequestResponse:
        """Says where the time of a request went."""
        del context
        check_known(request)
        return ExplainRequestResponse(story=explain(self._core, request.request_id))

    async def SubscribeKvEvents(  # noqa: N802  the protocol's name
        self, request: SubscribeKvEventsRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Streams which blocks are cached: a snapshot, then every change."""
        check_known(request)
        if not self._core.block_events:
            raise NotPermittedError("cached blocks are not shown; the engine lacks --kv-events")
        cursors = {each.data_parallel_rank: each.sequence_number for each in request.cursors}
        with self._streams.hold(KV_EVENTS, context):
            await context.send_initial_metadata(())
            async for part in follow(dict(enumerate(self._core.block_events)), cursors):
                await write_in_time(
                    context, part_to_proto(part), self._config.serving.slow_reader_timeout_s
                )

    async def Drain(  # noqa: N802  the protocol's name
        self, request: DrainRequest, context: grpc.aio.ServicerContext
    ) -> DrainResponse:
        """Finishes live requests and refuses new ones; then the server exits."""
        del context
        check_known(request)
        timeout_s = self._config.serving.drain_timeout_s
        if request.HasField("timeout_ms"):
            timeout_s = request.timeout_ms / 1000
        report = await self._core.drain.run(timeout_s)
        return DrainResponse(num_finished=report.num_finished, num_aborted=report.num_aborted)

    async def StartProfile(  # noqa: N802  the protocol's name
        self, request: StartProfileRequest, context: grpc.aio.ServicerContext
    ) -> StartProfileResponse:
        """Starts a profile of the worker's steps."""
        del context
        check_known(request)
        path = await self._core.profiles.start(
            max_steps=request.max_steps if request.HasField("max_steps") else None,
            max_s=request.duration_ms / 1000 if request.HasField("duration_ms") else None,
        )
        return StartProfileResponse(path=str(path))

    async def StopProfile(  # noqa: N802  the protocol's name
        self, request: StopProfileRequest, context: grpc.aio.ServicerContext
    ) -> StopProfileResponse:
        """Ends the running profile and waits for its trace."""
        del context
        check_known(request)
        path, report = await self._core.profiles.stop()
        return StopProfileResponse(
            path=str(path),
            num_bytes=report.num_bytes,
            num_steps=report.num_steps,
            duration_s=report.duration_s,
            end=report.end,
        )

    async def _watched(
        self, watcher: StepWatcher, request: WatchStepsRequest
    ) -> AsyncIterator[WatchStepsResponse]:
        if request.include_snapshot:
            yield await opening(watcher, self._settings())
        async for step in watcher:
            for each in step.images:
                yield recorded_image(each)
            yield WatchStepsResponse(
                descriptor=step.descriptor, result=step.result, num_missed=step.num_missed
            )

    def _settings(self) -> EngineSettings:
        worker = self._core.worker
        assert worker is not None, "whoever takes a snapshot has seen a worker"
        return engine_settings(self._model, self._config, worker)
