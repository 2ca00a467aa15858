"""Tables of settings that compiled pieces depend on or not.

A flag in neither table is part of the key, which is safe; a test then requires its row.
"""

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

IRRELEVANT_FLAGS = {
    "model": "what config.json says takes part; weights are inputs of the pieces",
    "served_model_name": _SERVICE,
    "host": _SERVICE,
    "port": _SERVICE,
    "tls_cert": _SERVICE,
    "tls_key": _SERVICE,
    "tls_client_ca": _SERVICE,
    "tls_allowed_clients": _SERVICE,
    "max_connections": _SERVICE,
    "max_streams_per_connection": _SERVICE,
    "max_sessions": _SERVICE,
    "vllm_grpc": _SERVICE,
    "openengine_grpc": _SERVICE,
    "device": "the device itself takes part",
    "devices": "the device itself takes part",
    "num_nodes": "only says where ranks run",
    "node_interface": _SERVICE,
    "node_secret_file": _SERVICE,
    "node_silence_timeout_s": _SERVICE,
    "all_reduce": "chosen inside the operator, as it runs",
    "eplb_interval": "which experts a rank holds is an input of the pieces",
    "kv_cache_dtype": "attention, which reads the cache, is never compiled",
    "language_model_only": "the model takes part, which sees images or not",
    "encoder_cache_tokens": "the table of encoded images is an input of the pieces",
    "max_encoder_tokens": _SERVICE,
    "lora": "adapters are content of buffers",
    "lora_folder": _SERVICE,
    "max_cpu_loras": _SERVICE,
    "weights_folder": _SERVICE,
    "apply_weights": "weights are inputs of the pieces",
    "weights_version": _SERVICE,
    "task": "hidden states are pooled after the model; a head left out is a fact of the model",
    "score_tokens": "logits are chosen after the model",
    "model_impl": "the model takes part, with the modules that run it",
    "gguf_file": "the model is the folder that is made of it",
    "load_format": "weights are inputs of the pieces",
    "max_model_len": _TABLE_SIZE,
    "block_size": _TABLE_SIZE,
    "num_kv_blocks": _TABLE_SIZE,
    "kv_cache_memory_mb": _TABLE_SIZE,
    "gpu_memory_utilization": _TABLE_SIZE,
    "max_num_seqs": _TABLE_SIZE,
    "max_num_batched_tokens": _TABLE_SIZE,
    "max_num_mixed_tokens": _SERVICE,
    "max_num_waiting": _SERVICE,
    "priority_ageing_s": _SERVICE,
    "host_kv_gb": _SERVICE,
    "disk_kv_dir": _SERVICE,
    "disk_kv_gb": _SERVICE,
    "enable_prefix_caching": _SERVICE,
    "shared_prefix_tokens": "attention, which reads prefixes, is never compiled",
    "kv_events": _SERVICE,
    "enforce_eager": "the level takes part, which is 0 with it",
    "cudagraph_mode": _GRAPHS,
    "cudagraph_capture_sizes": _GRAPHS,
    "cudagraph_piece_sizes": _GRAPHS,
    "cudagraph_encoder_sizes": _GRAPHS,
    "cuda_graph_sizes": _GRAPHS,
    "cudagraph_padding": _GRAPHS,
    "cudagraph_copy_inputs": "inputs are copied before the pieces run",
    "num_speculative_tokens": "draft layers run after the model and are not compiled",
    "min_speculative_tokens": "as num_speculative_tokens",
    "speculative_method": "as num_speculative_tokens",
    "draft_model": "it runs after the model; the layers that a head reads are a fact of their own",
    "prompt_lookup_min": _SERVICE,
    "prompt_lookup_max": _SERVICE,
    "capture_while_serving": _GRAPHS,
    "allow_unmatched_passes": "only decides whether to go on",
    "compile_sizes": "each size has an artifact of its own",
    "debug_dump_path": _PLACE,
    "compile_cache_dir": _PLACE,
    "histogram_dir": _SERVICE,
    "fail_on_late_build": _SERVICE,
    "heartbeat_interval_ms": _SERVICE,
    "step_timeout_s": _SERVICE,
    "worker_start_timeout_s": _SERVICE,
    "worker_patience_s": _SERVICE,
    "enable_sleep": "weights are inputs of the pieces, wherever they are",
    "start_asleep": _SERVICE,
    "drain_timeout_s": _SERVICE,
    "max_grammar_bytes": _GRAMMAR,
    "max_structured_requests": _GRAMMAR,
    "grammar_timeout_s": _GRAMMAR,
    "num_grammar_threads": _GRAMMAR,
    "credit_window": _SERVICE,
    "slow_reader_timeout_s": _SERVICE,
    "max_message_bytes": _SERVICE,
    "allow_watch_tokens": _SERVICE,
    "metrics_port": _SERVICE,
    "otlp_endpoint": _SERVICE,
    "profile_dir": _SERVICE,
    "profile_max_s": _SERVICE,
    "profile_max_mb": _SERVICE,
    "log_level": _SERVICE,
    "log_format": _SERVICE,
}
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
