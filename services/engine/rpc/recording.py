"""The first message of a recording: the engine, and the rows before the first step."""

from protos.engine.v1.engine_pb2 import WatchStepsResponse
from protos.engine.v1.recording_pb2 import EngineSettings, RecordedImage
from protos.engine.v1.worker_pb2 import WorkerReady
from services.engine.checkpoint.model_folder import ModelFolder
from services.engine.config.engine_config import EngineConfig
from services.engine.core.watchers import StepWatcher
from services.engine.errors import EngineUnavailableError
from services.engine.prompt_image import EncoderImage


async def opening(watcher: StepWatcher, settings: EngineSettings) -> WatchStepsResponse:
    """Returns the first message of a stream with a snapshot.

    Raises:
        EngineUnavailableError: the worker was lost while steps were in flight.
    """
    snapshot = await watcher.snapshot()
    if snapshot is None:
        raise EngineUnavailableError("the engine lost its worker before the first step")
    response = WatchStepsResponse(snapshot=snapshot)
    response.snapshot.engine.CopyFrom(settings)
    return response


def recorded_image(image: EncoderImage) -> WatchStepsResponse:
    """Returns the message of an image."""
    recorded = RecordedImage(digest=image.digest, patches=bytes(image.patches))
    return WatchStepsResponse(image=recorded)


def engine_settings(
    model: ModelFolder, config: EngineConfig, worker: WorkerReady
) -> EngineSettings:
    """Returns the settings that results of the worker's steps depend on."""
    return EngineSettings(
        model=model.name,
        architecture=model.architecture,
        config_sha256=model.config_sha256,
        load_format=config.checkpoint.load_format,
        quantization=config.checkpoint.quantization,
        task=config.checkpoint.task,
        batch_invariant=config.worker.batch_invariant,
        device_name=worker.device_name,
        dtype=worker.dtype,
        kv_cache_dtype=config.cache.kv_cache_dtype,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=model.max_model_len,
        block_size=config.cache.block_size,
        num_blocks=worker.num_blocks,
        compilation_level=config.compilation.level_on(
            "cpu" if worker.device_name == "cpu" else "cuda"
        ),
        use_inductor=config.compilation.use_inductor,
        cudagraph_mode=worker.cudagraph_mode,
        num_speculative_tokens=config.speculation.num_speculative_tokens,
        speculative_method=config.speculation.speculative_method,
        max_loras=config.adapters.max_loras,
        max_lora_rank=config.adapters.max_lora_rank,
        lora_embeddings=config.adapters.lora_embeddings,
        lora_experts=config.adapters.lora_experts,
    )
