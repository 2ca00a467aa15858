"""Flags of `vllm serve` that are not ours under the same name, and what becomes of them.

docs/from-vllm.md lists them all. Names are without dashes; short forms are among them.
Source: vllm/engine/arg_utils.py and vllm/entrypoints/openai/cli_args.py of vLLM.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

Service = Literal["engine", "frontend"]

RENAMED: Mapping[str, tuple[tuple[Service, str], ...]] = {
    "tp": (("engine", "tensor-parallel-size"),),
    "pp": (("engine", "pipeline-parallel-size"),),
    "dp": (("engine", "data-parallel-size"),),
    "ep": (("engine", "enable-expert-parallel"),),
    "q": (("engine", "quantization"),),
    "n": (("engine", "num-nodes"),),
    "nnodes": (("engine", "num-nodes"),),
    "lora-modules": (("engine", "lora"),),
    "enable-sleep-mode": (("engine", "enable-sleep"),),
    "num-gpu-blocks-override": (("engine", "num-kv-blocks"),),
    "capture-sizes": (("engine", "cudagraph-capture-sizes"),),
    "max-cudagraph-capture-size": (("engine", "cuda-graph-sizes"),),
    "api-server-count": (("frontend", "processes"),),
    "asc": (("frontend", "processes"),),
    "allowed-origins": (("frontend", "cors-origins"),),
    "tool-call-parser": (("frontend", "reply-format"),),
    "uvicorn-log-level": (("frontend", "log-level"),),
    "ssl-certfile": (("frontend", "tls-cert"),),
    "ssl-keyfile": (("frontend", "tls-key"),),
    "ssl-ca-certs": (("frontend", "tls-client-ca"),),
    "otlp-traces-endpoint": (("engine", "otlp-endpoint"), ("frontend", "otlp-endpoint")),
}
"""Name there -> the services that take it, each with its name here."""

OWN_FORMATS = (
    "auto", "hermes", "llama3_json", "pythonic", "mistral", "mistral_v11", "deepseek_v3",
    "deepseek_v31", "glm4", "qwen3_coder", "seed_oss", "minimax_m2", "minimax_m3", "kimi_k2",
    "gemma4", "harmony", "plain",
)  # fmt: skip
"""Values of --reply-format."""

VALUES: Mapping[str, Mapping[str, str | None]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "kv-cache-dtype": {"fp8": "fp8_e4m3"},
    "load-format": {"auto": None},
    "model-impl": {"vllm": "octavo"},
    "task": {"auto": None, "embedding": "embed"},
    "max-model-len": {"auto": None, "-1": None},
    "quantization": dict.fromkeys(
        [
            *("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "modelopt"),
            *("modelopt_fp4", "mxfp4", "quark"),
        ]
    ),
    "reply-format": {
        **{name: name for name in OWN_FORMATS},
        "deepseek_v32": "deepseek_v31",
        "glm45": "glm4",
        "glm47": "glm4",
        "llama4_json": "llama3_json",
        "llama4_pythonic": "pythonic",
        "openai": "harmony",
        "qwen3_xml": "qwen3_coder",
    },
    "log-level": {"critical": "error", "trace": "debug"},
}
"""Flag here -> a value there -> the value here, or None where leaving the flag out means that."""

_NO_TEXTS = "prompts and outputs are never logged"
_PREEMPTED = "requests that lose their blocks compute them again"

WITHOUT_EFFECT: Mapping[str, tuple[bool, str]] = {
    "enable-auto-tool-choice": (False, "the model may always call the tools of a request"),
    "reasoning-parser": (True, "reasoning is read as --reply-format or the chat template has it"),
    "enable-reasoning": (False, "reasoning is always read"),
    "trust-remote-code": (False, "code of a checkpoint is never run"),
    "disable-log-requests": (False, _NO_TEXTS),
    "enable-log-requests": (False, _NO_TEXTS),
    "max-log-len": (True, _NO_TEXTS),
    "disable-log-stats": (False, "`octavo stats` and --metrics-port have the figures"),
    "disable-uvicorn-access-log": (False, "a request is one line, when it ends"),
    "swap-space": (True, _PREEMPTED),
    "preemption-mode": (True, _PREEMPTED),
    "seed": (True, "a request has its own seed"),
    "enable-chunked-prefill": (False, "prompts are always computed in chunks that fit"),
    "async-scheduling": (False, "steps are always scheduled ahead"),
    "scheduling-policy": (True, "requests of equal priority are served in the order of arrival"),
    "distributed-executor-backend": (True, "ranks are processes; --num-nodes is for several hosts"),
    "disable-frontend-multiprocessing": (False, "the services are processes of their own"),
    "attention-backend": (True, "the device and the model decide"),
    "tokenizer-mode": (True, "the tokenizer is that of tokenizer.json"),
    "chat-template-content-format": (True, "the chat template decides"),
    "guided-decoding-backend": (True, "llguidance makes all structured output"),
    "enable-prompt-tokens-details": (False, "cached tokens are always in the usage"),
    "enable-lora": (False, "--lora, --lora-folder and --max-loras make room for adapters"),
    "runner": (True, "--task decides what a model is served for"),
}
"""Name there -> whether it has a value, and why it changes nothing here."""

_NODES = "--num-nodes, and `octavo worker-node` on the other hosts (docs/parallel.md)"
_COMPILATION = "--compilation-level, --cudagraph-mode and more (docs/compilation.md)"
_EXPERTS = "--eplb-interval STEPS and --num-redundant-experts (docs/parallel.md)"
_CONFIG = "change config.json in the model's folder"
_DEFAULTS = "send sampling fields, or change generation_config.json in the model's folder"
_PROXY = "a reverse proxy does that (deploy/proxy)"

ANSWERED: Mapping[str, str] = {
    "api-key": "--api-keys-file FILE, in which [keys.me] has a key (docs/security.md), as other "
    "users of a machine can read command lines",
    "chat-template": "put it into the model's folder as chat_template.jinja",
    "config": "give flags, or environment variables such as OCTAVO_ENGINE_MAX_NUM_SEQS",
    "hf-token": "set HF_TOKEN",
    "download-dir": "set HF_HOME; `octavo pull` fetches a model beforehand",
    "tokenizer-revision": "the tokenizer is of the model's revision",
    "code-revision": "code of a checkpoint is never run",
    "limit-mm-per-prompt": "--max-images-per-request N; images alone are served",
    "allowed-media-domains": "--media-hosts HOST,HOST",
    "mm-processor-cache-gb": "--image-cache-bytes N",
    "cpu-offload-gb": "weights stay on their device; --quantization fp8 halves them",
    "kv-cache-memory-bytes": "--num-kv-blocks, or --kv-cache-memory-mb on a CPU",
    "hf-overrides": _CONFIG,
    "rope-scaling": _CONFIG,
    "rope-theta": _CONFIG,
    "generation-config": _DEFAULTS,
    "override-generation-config": _DEFAULTS,
    "max-logprobs": "requests may ask for 20 at most",
    "compilation-config": _COMPILATION,
    "O": _COMPILATION,
    "cc": _COMPILATION,
    "disable-custom-all-reduce": "--all-reduce nccl",
    "enable-eplb": _EXPERTS,
    "eplb-config": _EXPERTS,
    "kv-transfer-config": "caches are not moved between engines",
    "structured-outputs-config": "--max-grammar-bytes and more (docs/structured-output.md)",
    "node-rank": _NODES,
    "master-addr": _NODES,
    "master-port": _NODES,
    "headless": _NODES,
    "data-parallel-size-local": _NODES,
    "data-parallel-address": _NODES,
    "data-parallel-rpc-port": _NODES,
    "root-path": _PROXY,
    "middleware": _PROXY,
    "uds": _PROXY,
    "no-enable-chunked-prefill": "--max-num-batched-tokens is the most tokens of a chunk",
    "disable-cascade-attn": "--shared-prefix-tokens 0",
}
"""Name there -> the way here, for flags that cannot be passed over."""

_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([kKmMgG])")
_UNITS = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}
_COUNTS = ("max-model-len", "max-num-batched-tokens")
"""Flags whose values may have a unit there, such as 32k."""
_DRAFTS = {
    "num_speculative_tokens": "num-speculative-tokens",
    "model": "draft-model",
    "prompt_lookup_min": "prompt-lookup-min",
    "prompt_lookup_max": "prompt-lookup-max",
}
"""Field of --speculative-config -> flag here."""


def value_here(flag: str, value: str) -> str | None:
    """Returns the value of one of our flags for one of vLLM's; None to leave the flag out.

    Raises:
        ValueError: there is none.
    """
    if flag == "reply-format" and value not in VALUES[flag]:
        raise ValueError("there is no such format here; without the flag the chat template chooses")
    if flag in _COUNTS and (match := _NUMBER.fullmatch(value)):
        return str(int(float(match[1]) * _UNITS[match[2]]))
    if flag == "cors-origins" and value.startswith("["):
        return ",".join(json.loads(value))
    return VALUES.get(flag, {}).get(value, value)


def speculation_flags(config: Mapping[str, Any]) -> Iterator[str]:
    """Yields the engine's flags for a --speculative-config.

    Raises:
        ValueError: it has a method or a field that has no equal here.
    """
    fields = dict(config)
    method = str(fields.pop("method", "draft_model"))
    if method == "ngram" or method.endswith("mtp"):
        fields.pop("model", None)
        yield f"--speculative-method={'ngram' if method == 'ngram' else 'mtp'}"
    elif method not in ("draft_model", "eagle3"):
        raise ValueError(f"method {method}: there are mtp, ngram and draft models")
    for name, value in fields.items():
        if name not in _DRAFTS:
            raise ValueError(f"{name}: there is no such setting; docs/speculation.md has ours")
        yield f"--{_DRAFTS[name]}={value}"
