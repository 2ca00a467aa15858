"""Tables of settings that compiled pieces depend on or not.

A flag in neither table is part of the key, which is safe; a test then requires its row.
"""

from collections.abc import Mapping

_GRAPHS = "graphs are captured around pieces, which stay the same"
_PLACE = "only says where to write"
_SERVICE = "concerns the service, not the model"
_GRAMMAR = "grammars mask logits, after the model has run"
_TABLE_SIZE = "pieces see query tokens only, and any number of them"

RELEVANT_FLAGS = {
    "dtype": "what the pieces compute in",
    "quantization": "whether layers multiply in 8 bits",
    "num_threads": "code for a CPU is generated for a number of threads",
    "batch_invariant": "Inductor makes no code, and some layers call other operators",
    "gpu_tables": "which operators are fused",
    "compilation_level": "whether the model is split, and traced at all",
    "splitting_ops": "where the model is split",
    "compile_ranges": "which steps run the same pieces",
    "passes": "what is put together before the model is split",
    "disable_pass": "as passes",
    "max_num_streams": "whether shared experts get an operator with two streams",
    "use_inductor": "which compiler makes the pieces",
    "inductor_compile_config": "settings of the compiler",
    "tensor_parallel_size": "each rank computes a share of every layer",
    "enable_expert_parallel": "experts get another operator",
    "num_redundant_experts": "decides how many experts a rank has",
    "data_parallel_size": "the tokens of all ranks are gathered before experts",
    "pipeline_parallel_size": "each rank computes the layers of its stage",
    "pipeline_layers": "as pipeline_parallel_size",
    "max_loras": "layers have another operator and room for adapters",
    "max_lora_rank": "as max_loras",
    "lora_embeddings": "as max_loras",
    "lora_experts": "as max_loras",
}
"""Flag -> how compiled pieces depend on it."""

FLAGS_BY_REASON: Mapping[str, tuple[str, ...]] = {
    "what config.json says takes part; weights are inputs of the pieces": ("model",),
    _SERVICE: (
        "served_model_name", "host", "port", "tls_cert", "tls_key", "tls_client_ca",
        "tls_allowed_clients", "max_connections", "max_streams_per_connection", "max_sessions",
        "vllm_grpc", "openengine_grpc", "node_interface", "node_secret_file",
        "node_silence_timeout_s", "max_encoder_tokens", "lora_folder", "max_cpu_loras",
        "weights_folder", "weights_version", "max_num_mixed_tokens", "max_num_waiting",
        "priority_ageing_s", "host_kv_gb", "disk_kv_dir", "disk_kv_gb", "enable_prefix_caching",
        "kv_events", "prompt_lookup_min", "prompt_lookup_max", "histogram_dir",
        "fail_on_late_build", "heartbeat_interval_ms", "step_timeout_s", "worker_start_timeout_s",
        "worker_patience_s", "start_asleep", "drain_timeout_s", "credit_window",
        "slow_reader_timeout_s", "max_message_bytes", "allow_watch_tokens", "metrics_port",
        "otlp_endpoint", "profile_dir", "profile_max_s", "profile_max_mb", "log_level",
        "log_format",
    ),
    "the device itself takes part": ("device", "devices"),
    "only says where ranks run": ("num_nodes",),
    "chosen inside the operator, as it runs": ("all_reduce",),
    "which experts a rank holds is an input of the pieces": ("eplb_interval",),
    "attention, which reads the cache, is never compiled": ("kv_cache_dtype",),
    "the model takes part, which sees images or not": ("language_model_only",),
    "the table of encoded images is an input of the pieces": ("encoder_cache_tokens",),
    "adapters are content of buffers": ("lora",),
    "weights are inputs of the pieces": ("apply_weights", "load_format"),
    "hidden states are pooled after the model; a head left out is a fact of the model": ("task",),
    "logits are chosen after the model": ("score_tokens",),
    "the model takes part, with the modules that run it": ("model_impl",),
    "the model is the folder that is made of it": ("gguf_file",),
    _TABLE_SIZE: (
        "max_model_len", "block_size", "num_kv_blocks", "kv_cache_memory_mb",
        "gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens",
    ),
    "attention, which reads prefixes, is never compiled": ("shared_prefix_tokens",),
    "the level takes part, which is 0 with it": ("enforce_eager",),
    _GRAPHS: (
        "cudagraph_mode", "cudagraph_capture_sizes", "cudagraph_piece_sizes",
        "cudagraph_encoder_sizes", "cuda_graph_sizes", "cudagraph_padding", "capture_while_serving",
    ),
    "inputs are copied before the pieces run": ("cudagraph_copy_inputs",),
    "draft layers run after the model and are not compiled": ("num_speculative_tokens",),
    "as num_speculative_tokens": ("min_speculative_tokens", "speculative_method"),
    "it runs after the model; the layers that a head reads are a fact of their own": (
        "draft_model",
    ),
    "only decides whether to go on": ("allow_unmatched_passes",),
    "each size has an artifact of its own": ("compile_sizes",),
    _PLACE: ("debug_dump_path", "compile_cache_dir"),
    "weights are inputs of the pieces, wherever they are": ("enable_sleep",),
    _GRAMMAR: (
        "max_grammar_bytes", "max_structured_requests", "grammar_timeout_s", "num_grammar_threads",
    ),
}  # fmt: skip
"""Why no compiled piece depends on some flags -> these flags."""

IRRELEVANT_FLAGS = {name: why for why, names in FLAGS_BY_REASON.items() for name in names}
"""Flag -> why no compiled piece depends on it."""

IRRELEVANT_MODEL_FIELDS = {
    "eos_token_ids": "the scheduler ends sequences",
    "num_draft_layers": "draft layers run after the model and are not compiled",
    "draft_window": "it follows from the architecture and the other windows",
}
"""Field of ModelConfig -> why no compiled piece depends on it; all others take part."""

IRRELEVANT_SOURCES = {
    "models/loading": "weights are inputs of the pieces",
    "models/kernels": "kernels run inside operators that the compiler does not look into",
    "services/engine/compilation/graphs": _GRAPHS,
    "services/engine/compilation/cache/explain.py": "only reads what is stored",
    "services/engine/compilation/program/debug_dump.py": _PLACE,
    "services/engine/compilation/trace/transformed_code.py": _PLACE,
}
"""Folder or file of models/ or services/engine/compilation -> why no piece depends on it."""

CODE_VARIABLES = (
    "DISABLE_LLVM_OPT",
    "DISABLE_PTXAS_OPT",
    "TRITON_DEFAULT_FP_FUSION",
    "TRITON_F32_DEFAULT",
    "TRITON_OVERRIDE_ARCH",
    "TRITON_PTXAS_PATH",
)
"""Environment variables that change Triton's code. Inductor's own are among its settings.

Source: triton 3.6, python/triton/knobs.py and include/triton/Tools/Sys/GetEnv.hpp.
"""
