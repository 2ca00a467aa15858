"""Refuses flags that a model's configuration rules out."""

from models.config import ModelConfig
from models.config_sections.mixers import STATE
from models.parallel.group import ParallelGroup, PipelineStage
from services.engine.config.engine_config import EngineConfig
from services.engine.config.parallel import ParallelConfig


def check_model_fit(config: EngineConfig, model: ModelConfig) -> None:
    """Refuses flags that do not fit a model, before processes start and weights are read.

    Raises:
        ValueError: it names the flag and what the model has.
    """
    parallel = config.parallel
    check_data_parallel(model, parallel.data_parallel_size)
    _check_drafts(config, model)
    if model.compression is not None:
        _check_compression(config, model)
    if config.worker.batch_invariant:
        check_batch_invariance(
            model,
            num_ranks=parallel.tensor_parallel_size,
            moves_experts=parallel.eplb_interval > 0,
        )
    _check_image_room(config, model)
    _check_whole_prompts(config, model)
    own_experts = None if model.transformers is not None else model.moe
    if parallel.enable_expert_parallel and parallel.tensor_parallel_size > 1 and not own_experts:
        raise ValueError(
            "--enable-expert-parallel needs a model with experts that Octavo's own modules run; "
            f"{model.architecture} is not one"
        )
    if model.transformers is not None and config.adapters.max_loras:
        raise ValueError(
            f"--max-loras is {config.adapters.max_loras}: adapters do not work with "
            f"{model.architecture}, which runs as modules of transformers"
        )
    if model.transformers is not None:
        _check_single(model, parallel)
        return
    _check_shares(model, parallel)
    _check_stages(model, parallel)


def _check_drafts(config: EngineConfig, model: ModelConfig) -> None:
    num_drafts, longest = config.speculation.num_speculative_tokens, model.max_position_embeddings
    if longest <= num_drafts:
        raise ValueError(
            f"--num-speculative-tokens is {num_drafts}: it must be less than {longest}, the tokens "
            f"of the longest sequence of {model.architecture}"
        )
    if config.speculation.has_draft_model and set(model.cache_windows) == {STATE}:
        raise ValueError(
            f"--draft-model does not cover {model.architecture}: none of its layers keeps keys, "
            "among whose blocks those of a draft model would be"
        )


def _check_compression(config: EngineConfig, model: ModelConfig) -> None:
    """Refuses flags that attention to compressed keys, or its experts, do not cover."""
    parallel = config.parallel
    name = model.architecture
    if config.cache.kv_cache_dtype != "auto":
        raise ValueError(
            f"--kv-cache-dtype {config.cache.kv_cache_dtype} does not cover {name}: compressed "
            "keys are cached in the model's dtype"
        )
    for flag, is_set in (
        ("--host-kv-gb", config.cache.host_kv_gb > 0),
        ("--kv-events", config.cache.kv_events),
    ):
        if is_set:
            raise ValueError(f"{flag} does not cover {name}, whose groups have blocks of two sizes")
    if config.speculation.has_draft_model:
        raise ValueError(
            f"--draft-model does not cover {name}, whose first blocks hold compressed keys; "
            "--speculative-method ngram drafts without a model"
        )
    for flag, is_set in (
        ("--enable-expert-parallel", parallel.enable_expert_parallel),
        ("--data-parallel-size", parallel.data_parallel_size > 1),
    ):
        if is_set:
            raise ValueError(f"{flag} does not cover {name}, whose experts ranks share by parts")


def _check_image_room(config: EngineConfig, model: ModelConfig) -> None:
    num_decodes = config.scheduler.max_num_seqs * (1 + config.speculation.num_speculative_tokens)
    most, needed = config.max_num_batched_tokens, model.max_whole_tokens + num_decodes
    if model.max_whole_tokens and most < needed:
        raise ValueError(
            f"--max-num-batched-tokens is {most}; it must be {needed} or more, as a step of "
            f"{model.architecture} computes whole images, {model.max_whole_tokens} tokens, beside "
            f"{num_decodes} of requests that decode; --language-model-only serves its text"
        )


def _check_whole_prompts(config: EngineConfig, model: ModelConfig) -> None:
    if not model.sees_later:
        return
    if config.checkpoint.task != "embed":
        raise ValueError(
            f"tokens of {model.architecture} with use_bidirectional_attention see later ones, so "
            "it generates none: --task embed serves it"
        )
    most = config.max_num_batched_tokens
    longest = config.checkpoint.max_model_len or model.max_position_embeddings
    if most < longest:
        raise ValueError(
            f"--max-num-batched-tokens is {most}; it must be {longest} or more, as a step of "
            f"{model.architecture} computes whole prompts; --max-model-len bounds these"
        )


def _check_single(model: ModelConfig, parallel: ParallelConfig) -> None:
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if (size := getattr(parallel, name)) > 1:
            raise ValueError(
                f"--{name.replace('_', '-')} {size} does not cover transformers' modules, which "
                f"run {model.architecture}"
            )


def _check_stages(model: ModelConfig, parallel: ParallelConfig) -> None:
    num_layers, size = tuple(parallel.pipeline_layers or ()), parallel.pipeline_parallel_size
    for rank in range(size):
        stage = PipelineStage(rank=rank, size=size, num_layers=num_layers)
        own = stage.layers_of(model.num_hidden_layers)
        if not any(layer in own for layer in model.entry_layers):
            raise ValueError(
                f"--pipeline-parallel-size is {size}: stage {rank} has layers {own.start} to "
                f"{own.stop - 1}, none of which caches anything; --pipeline-layers moves stages"
            )


def _check_shares(model: ModelConfig, parallel: ParallelConfig) -> None:
    size = parallel.tensor_parallel_size
    group = ParallelGroup(size=size)
    has_whole_experts = parallel.enable_expert_parallel or parallel.data_parallel_size > 1
    try:
        if model.delta_net is not None:
            group.split(model.delta_net.num_k_heads, "key heads of a state")
        if model.mamba2 is not None:
            num_groups = model.mamba2.num_groups
            group.split(model.mamba2.num_heads, "heads of a state")
            group.split(num_groups, "groups of heads", replicas=max(1, size // num_groups))
        if all(window == STATE for window in model.cache_windows):
            return  # Mamba 2, which has no feed-forward layers either
        group.split(model.num_attention_heads, "attention heads")
        if (
            model.mla is None and model.compression is None
        ):  # the ranks' caches of latent vectors are equal
            for num_kv_heads in {
                model.heads_of(layer).num_kv_heads for layer in range(model.num_hidden_layers)
            }:
                group.split(num_kv_heads, "kv heads", replicas=max(1, size // num_kv_heads))
        if model.compression is not None:
            group.split(model.compression.num_output_groups, "groups of heads")
        if model.moe is None:
            group.split(model.intermediate_size, "inner features")
        elif not has_whole_experts:
            group.split(model.moe.intermediate_size, "inner features of an expert")
    except ValueError as error:
        raise ValueError(f"--tensor-parallel-size is {size}: {error}") from error


def check_data_parallel(model: ModelConfig, size: int) -> None:
    """Refuses a model whose ranks would have nothing to share.

    Raises:
        ValueError: it names the model's family, and what to do instead.
    """
    if size == 1:
        return
    name = model.architecture
    if model.transformers is not None:
        raise ValueError(
            f"--data-parallel-size {size} does not cover transformers' modules, which run {name}"
        )
    if model.moe is None:
        raise ValueError(
            f"--data-parallel-size {size} needs a model with experts, and {name} has none: "
            f"`octavo serve --engines {size}` runs independent engines"
        )


def check_batch_invariance(model: ModelConfig, *, num_ranks: int, moves_experts: bool) -> None:
    """Refuses a family or a setting that the mode does not cover.

    Raises:
        ValueError: it names the family or the flag, and what depends on the batch.
    """
    if moves_experts:
        raise ValueError(
            "--batch-invariant does not cover --eplb-interval: experts that move between ranks "
            "change the order of a token's sum"
        )
    name = model.architecture
    if model.transformers is not None:
        raise ValueError(
            f"--batch-invariant covers none of transformers' modules, which run {name}: their "
            "operations choose their order by the size of the batch"
        )
    if model.compression is not None or model.hyper is not None:
        raise ValueError(
            f"--batch-invariant does not cover compressed keys and hyper-connections, which {name} "
            "has: their sums depend on the batch"
        )
    if model.max_whole_tokens:
        raise ValueError(
            f"--batch-invariant does not cover images of {name}, whose tokens attend to later "
            "ones; --language-model-only serves its text"
        )
    if model.sees_later:
        raise ValueError(
            f"--batch-invariant does not cover {name} with use_bidirectional_attention, whose "
            "tokens attend to later ones"
        )
    if num_ranks > 1 and model.architecture == "Olmo2ForCausalLM":
        raise ValueError(
            f"--batch-invariant does not cover {name} with --tensor-parallel-size {num_ranks}: its "
            "norms sum over the ranks in an order that depends on the batch"
        )
