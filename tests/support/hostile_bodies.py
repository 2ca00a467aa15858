"""HTTP requests that only an attacker sends."""

import json
import random
from dataclasses import dataclass
from typing import Any

_CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
_COMPLETION = {"model": "tiny", "prompt": "Once", "max_tokens": 2}
_SEEDS = {"/v1/chat/completions": _CHAT, "/v1/completions": _COMPLETION}
_PATHS = (
    *("/v1/models", "/v1/models/tiny", "/v1/models/%00", "/v1/models/..%2f..", "/v1/embeddings"),
    *("/health", "/metrics", "/openapi.json", "/", "/v1", "//", "/v1/models/" + "x" * 2000),
)
_FIELDS = (
    *("messages", "prompt", "stop", "stop_token_ids", "logit_bias", "seed", "n", "best_of", "echo"),
    *("temperature", "top_p", "top_k", "min_p", "max_tokens", "max_completion_tokens", "stream"),
    *("logprobs", "top_logprobs", "response_format", "tools", "stream_options", "min_tokens"),
    *("frequency_penalty", "repetition_penalty", "model", "user", "made_up", ""),
)
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 20, 2**31, 2**64, -(2**63), 10**400, 0.5, 1e308, -0.0),
    *("", "tiny", "text", "x" * 3000, "\0", "\ud800", "\U0001f4a5", "<|im_end|>", "{{ 7 * 7 }}"),
    *([], [[]], [""], [1, 2, 3], [0] * 3000, [None], [{"role": "user"}], ["a"] * 17),
    *({}, {"type": "text"}, {"1": 1}, {"-1": 0}, {"x": "y"}, {"type": "json_object"}),
    {"include_usage": True},
)


@dataclass(frozen=True)
class HostileRequest:
    """The bytes to send."""

    method: str
    path: str
    body: bytes
    content_type: str = "application/json"


def hostile_request(rng: random.Random) -> HostileRequest:
    """Returns a request that depends on the generator alone."""
    kind = rng.random()
    method = rng.choice(("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"))
    if kind < 0.1:
        return HostileRequest(method, rng.choice((*_PATHS, *_SEEDS)), rng.randbytes(20))
    path, seed = rng.choice(list(_SEEDS.items()))
    body = json.loads(json.dumps(seed))
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        body[rng.choice(_FIELDS)] = _value(rng, 0)
    data = json.dumps(body).encode()
    if kind < 0.3:
        data = _damaged(rng, data)
    media_type = "text/plain" if kind > 0.98 else "application/json"
    return HostileRequest("POST", path, data, media_type)


def _value(rng: random.Random, depth: int) -> Any:
    kind = rng.random()
    if depth > 3 or kind < 0.8:
        return rng.choice(_VALUES)
    items = [_value(rng, depth + 1) for _ in range(rng.randint(0, 4))]
    if kind < 0.9:
        return items
    return {rng.choice((*_FIELDS, "role", "content", "type", "text")): item for item in items}


def _damaged(rng: random.Random, data: bytes) -> bytes:
    match rng.randrange(5):
        case 0:
            return data[: rng.randint(0, len(data))]
        case 1:
            return rng.randbytes(rng.randint(0, 100))
        case 2:
            return b"[" * rng.choice((10, 3000)) + data
        case 3:
            return data.replace(b":", b",", 1)
    at = rng.randrange(len(data))
    return data[:at] + rng.randbytes(2) + data[at:]
