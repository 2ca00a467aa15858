"""Descriptions of the engine, its model and its load in OpenEngine's messages."""

import time

from protos.openengine.v1 import openengine_pb2
from protos.openengine.v1.openengine_pb2 import (
    DeploymentCapacity,
    GenerationCapabilities,
    GuidedDecodingCapabilities,
    HealthCheck,
    HealthResponse,
    LoadInfo,
    LogprobCapabilities,
    ModelInfo,
    ParallelismInfo,
    RankLoadInfo,
    ServerInfo,
    TokenizerInfo,
)
from services.engine.checkpoint.model_folder import ModelFolder
from services.engine.config.engine_config import EngineConfig
from services.engine.core.engine_core import EngineCore
from services.engine.edge.call import MAX_SAMPLES
from services.engine.openengine.pooled import task_capabilities
from services.engine.request import MAX_LOGPROBS
from services.engine.scheduler.stats import RankLoad
from services.settings.installation import own_version

SCHEMA_REVISION = 1
SCHEMA_RELEASE = "9d3c319796fe74d502d5f53ee5942620699f60d4"
"""Commit of github.com/ai-dynamo/openengine with the served contract."""
_GUIDED_MODES = (
    openengine_pb2.GUIDED_DECODING_MODE_JSON_SCHEMA,
    openengine_pb2.GUIDED_DECODING_MODE_REGEX,
    openengine_pb2.GUIDED_DECODING_MODE_EBNF_GRAMMAR,
    openengine_pb2.GUIDED_DECODING_MODE_CHOICE,
    openengine_pb2.GUIDED_DECODING_MODE_JSON_OBJECT,
)


def model_source(config: EngineConfig) -> str:
    """Returns the model's folder, from which callers may read the tokenizer."""
    return str(config.checkpoint.model.absolute())


def server_info(core: EngineCore, model: ModelFolder, config: EngineConfig) -> ServerInfo:
    """Describes the engine's settings and capacity."""
    parallel = config.parallel
    return ServerInfo(
        engine_name="octavo",
        engine_version=own_version(),
        engine_role=openengine_pb2.ENGINE_ROLE_AGGREGATED,
        instance_id=core.engine_id,
        supported_models=[model.name],
        parallelism=ParallelismInfo(
            tensor_parallel_size=parallel.tensor_parallel_size,
            pipeline_parallel_size=parallel.pipeline_parallel_size,
            data_parallel_size=parallel.data_parallel_size,
        ),
        schema_revision=SCHEMA_REVISION,
        minimum_client_revision=SCHEMA_REVISION,
        schema_release=SCHEMA_RELEASE,
        capacity=DeploymentCapacity(
            kv_block_size=config.cache.block_size,
            total_kv_blocks=max(0, core.num_blocks - 1),
            max_running_requests=config.max_running,
            max_batched_tokens=config.max_num_batched_tokens,
            max_loras=config.adapters.max_loras,
        ),
    )


def model_info(model: ModelFolder, config: EngineConfig) -> ModelInfo:
    """Describes the model and what requests of it may ask for."""
    logprobs = LogprobCapabilities(
        supported=True,
        candidate_selection_modes=[openengine_pb2.CANDIDATE_TOKEN_SELECTION_MODE_TOP_N],
        max_top_n=MAX_LOGPROBS,
    )
    source = model_source(config)
    info = ModelInfo(
        model_id=source,
        served_model_name=model.name,
        max_context_length=model.max_model_len,
        tokenizer=TokenizerInfo(source=source, mode="auto"),
        supports_text_input=False,
        supports_token_ids_input=True,
        supports_lora=config.adapters.max_loras > 0,
        supports_multimodal=False,
    )
    if model.pooling is not None:
        info.tasks.CopyFrom(task_capabilities(model.pooling, model, config))
        return info
    info.max_output_tokens = model.max_model_len - 1
    info.generation.CopyFrom(
        GenerationCapabilities(
            prompt_logprobs=logprobs,
            output_logprobs=logprobs,
            guided_decoding=GuidedDecodingCapabilities(supported=True, modes=_GUIDED_MODES),
            max_num_sequences=MAX_SAMPLES,
            supports_priority=True,
            supports_stop_in_output=True,
            supports_cache_salt=True,
            supports_prefix_cache_bypass=False,
        )
    )
    return info


def load_info(core: EngineCore, *, with_ranks: bool) -> LoadInfo:
    """Describes the load of the engine, and of each data-parallel rank if wanted."""
    load = core.load()
    info = LoadInfo(
        instance_id=core.engine_id,
        timestamp_unix_nanos=time.time_ns(),
        running_requests=load.num_running,
        queued_requests=load.num_waiting,
        used_kv_blocks=load.num_used_blocks,
        total_kv_blocks=max(0, core.num_blocks - 1),
    )
    if with_ranks:
        alone = RankLoad(
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            num_free_blocks=load.num_free_blocks,
        )
        ranks = core.stats().rank_loads or (alone,)
        num_blocks = max(0, core.num_blocks - 1) // len(ranks)
        info.ranks.extend(
            RankLoadInfo(
                data_parallel_rank=rank,
                running_requests=each.num_running,
                queued_requests=each.num_waiting,
                used_kv_blocks=num_blocks - each.num_free_blocks,
                total_kv_blocks=num_blocks,
            )
            for rank, each in enumerate(ranks)
        )
    return info


def health(core: EngineCore) -> HealthResponse:
    """Says whether requests are taken."""
    if core.drain.has_begun:
        state, message = openengine_pb2.HEALTH_STATE_DRAINING, "requests are only finished"
    elif core.is_ready:
        state, message = openengine_pb2.HEALTH_STATE_READY, ""
    elif core.worker is None:
        state, message = openengine_pb2.HEALTH_STATE_STARTING, "the worker is starting"
    else:
        state, message = openengine_pb2.HEALTH_STATE_NOT_READY, "the next worker is starting"
    check = HealthCheck(name="scheduler", state=state, message=message)
    return HealthResponse(state=state, checks=[check])
