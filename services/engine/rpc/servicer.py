"""The methods of EngineService."""
# ruff: noqa: N802  methods have the protocol's names

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
from services.engine.core.watchers import StepWatcher
from services.engine.edge.call import GenerateCall
from services.engine.edge.edge import Edge
from services.engine.edge.kv_events import follow
from services.engine.edge.open_streams import KV_EVENTS, TOKENIZER, WATCH
from services.engine.edge.request_reader import check_known
from services.engine.edge.unary import checked
from services.engine.errors import NotPermittedError
from services.engine.kv_cache.prefix_index import PREFIX_KEY_VERSION
from services.engine.rpc.explain import explain
from services.engine.rpc.kv_events import part_to_proto
from services.engine.rpc.pooling import pooling_to_proto
from services.engine.rpc.recording import engine_settings, opening, recorded_image
from services.engine.rpc.session import Session
from services.engine.rpc.single import SingleMessage
from services.engine.rpc.stats import stats_to_proto
from services.transport.message_reader import RefusedMessage

TOKENIZER_PART_BYTES = 2**18
"""Bytes of a tokenizer file in one message."""
_checked = checked(lambda _, request: check_known(request))


class EngineServicer(EngineServiceServicer):
    """The methods of EngineService; the interceptor maps the errors that they raise."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._num_sessions = 0

    @property
    def num_sessions(self) -> int:
        """Frontends connected now."""
        return self._num_sessions

    async def Session(
        self,
        messages: AsyncIterator[FrontendMessage | RefusedMessage],
        context: "grpc.aio.ServicerContext[FrontendMessage, EngineMessage]",
    ) -> None:
        """Serves one frontend over one stream."""
        self._num_sessions += 1
        try:
            await Session(self._edge, context, messages).run()
        finally:
            self._num_sessions -= 1

    async def Generate(
        self,
        request: GenerateRequest,
        context: "grpc.aio.ServicerContext[GenerateRequest, GenerateResponse]",
    ) -> None:
        """Serves one request over one call."""
        await GenerateCall(self._edge, context).run(SingleMessage(request))

    @_checked
    async def GetModelInfo(self, request: GetModelInfoRequest) -> GetModelInfoResponse:
        """Returns the model and its limits."""
        model, worker = self._edge.model, self._edge.core.worker
        info = GetModelInfoResponse(
            model=model.name,
            architecture=model.architecture,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            eos_token_ids=sorted(model.eos_token_ids),
            default_sampling=self._edge.reader.default_sampling(),
            tokenizer_sha256=model.tokenizer.sha256,
            engine_id=self._edge.core.engine_id,
            block_size=self._edge.config.cache.block_size,
            config_sha256=model.config_sha256,
            prefix_key_version=PREFIX_KEY_VERSION,
            max_running=self._edge.config.max_running,
            weights_version=self._edge.core.weights.version,
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
            info.num_blocks = self._edge.core.num_blocks
            info.device_name = worker.device_name
            info.dtype = worker.dtype
            info.num_parameters = worker.num_parameters
        return info

    async def GetTokenizer(
        self, request: GetTokenizerRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Sends the tokenizer's files."""
        check_known(request)
        with self._edge.streams.hold(TOKENIZER, context):
            for file in self._edge.model.tokenizer.files:
                for start in range(0, max(len(file.content), 1), TOKENIZER_PART_BYTES):
                    part = file.content[start : start + TOKENIZER_PART_BYTES]
                    response = GetTokenizerResponse(file_name=file.name, content=part)
                    await self._edge.write(context, response)

    @_checked
    async def GetStats(self, request: GetStatsRequest) -> GetStatsResponse:
        """Returns counts and the present load."""
        core = self._edge.core
        # Capture sizes are planned for steps of one query token a request, or of prompts.
        is_speculative = self._edge.config.speculation.num_speculative_tokens > 0
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

    async def WatchSteps(
        self, request: WatchStepsRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Streams every step from now on."""
        check_known(request)
        wants_tokens = request.include_token_ids or request.include_snapshot
        if wants_tokens and not self._edge.config.serving.allow_watch_tokens:
            raise NotPermittedError(
                "token ids are not shown; the engine lacks --allow-watch-tokens"
            )
        with self._edge.streams.hold(WATCH, context):
            watcher = self._edge.core.watch(
                include_token_ids=request.include_token_ids,
                include_snapshot=request.include_snapshot,
            )
            try:
                # From here on, the watcher sees every step that it causes.
                await context.send_initial_metadata(())
                async for response in self._watched(watcher, request):
                    await self._edge.write(context, response)
            finally:
                self._edge.core.watchers.remove(watcher)

    @_checked
    async def ExplainRequest(self, request: ExplainRequestRequest) -> ExplainRequestResponse:
        """Says where the time of a request went."""
        return ExplainRequestResponse(story=explain(self._edge.core, request.request_id))

    async def SubscribeKvEvents(
        self, request: SubscribeKvEventsRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Streams which blocks are cached: a snapshot, then every change."""
        check_known(request)
        if not self._edge.core.block_events:
            raise NotPermittedError("cached blocks are not shown; the engine lacks --kv-events")
        cursors = {each.data_parallel_rank: each.sequence_number for each in request.cursors}
        with self._edge.streams.hold(KV_EVENTS, context):
            await context.send_initial_metadata(())
            async for part in follow(dict(enumerate(self._edge.core.block_events)), cursors):
                await self._edge.write(context, part_to_proto(part))

    @_checked
    async def Drain(self, request: DrainRequest) -> DrainResponse:
        """Finishes live requests and refuses new ones; then the server exits."""
        timeout_s = self._edge.config.serving.drain_timeout_s
        if request.HasField("timeout_ms"):
            timeout_s = request.timeout_ms / 1000
        report = await self._edge.core.drain.run(timeout_s)
        return DrainResponse(num_finished=report.num_finished, num_aborted=report.num_aborted)

    @_checked
    async def StartProfile(self, request: StartProfileRequest) -> StartProfileResponse:
        """Starts a profile of the worker's steps."""
        path = await self._edge.core.profiles.start(
            max_steps=request.max_steps if request.HasField("max_steps") else None,
            max_s=request.duration_ms / 1000 if request.HasField("duration_ms") else None,
        )
        return StartProfileResponse(path=str(path))

    @_checked
    async def StopProfile(self, request: StopProfileRequest) -> StopProfileResponse:
        """Ends the running profile and waits for its trace."""
        path, report = await self._edge.core.profiles.stop()
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
        worker = self._edge.core.worker
        assert worker is not None, "whoever takes a snapshot has seen a worker"
        return engine_settings(self._edge.model, self._edge.config, worker)
