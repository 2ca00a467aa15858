"""Scores of texts over HTTP, taken as evaluations take them, equal those of transformers."""

import json
import shutil

import httpx
import pytest
import torch

from services.engine.config.checkpoint import TINY_CHECKPOINT
from tests.support.processes import free_port, stack
from tests.support.random_checkpoints import transformers_logits, write_checkpoint

NUM_TEXTS, NUM_TOKENS = 12, 1024


def _texts(model) -> list[tuple[list[int], list[int]]]:
    """Returns contexts, and continuations of which every other is the most likely one."""
    generator = torch.Generator().manual_seed(0)
    texts = []
    for index in range(NUM_TEXTS):
        context = torch.randint(8, NUM_TOKENS, (1 + index % 5,), generator=generator).tolist()
        rest: list[int] = []
        for _ in range(1 + index % 4):
            likely = int(transformers_logits(model, context + rest)[-1].argmax())
            rest.append(likely if index % 2 else (likely + 1) % NUM_TOKENS)
        texts.append((context, rest))
    return texts


def test_every_value_is_that_of_transformers_where_the_next_token_ends_the_output(tmp_path):
    model = write_checkpoint(tmp_path, "llama", vocab_size=NUM_TOKENS)
    texts = _texts(model)
    logits = [transformers_logits(model, context + rest) for context, rest in texts]
    ends = sorted({int(each[-1].argmax()) for each in logits})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_CHECKPOINT / name, tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    port = free_port()
    with stack(engine={"model": tmp_path, "num_kv_blocks": 64}, frontend={"http_port": port}):
        body = {
            "model": tmp_path.name,
            "prompt": [context + rest for context, rest in texts],
            "max_tokens": 1,
            "logprobs": 1,
            "temperature": 0,
            "echo": True,
        }
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    assert {choice["finish_reason"] for choice in choices} == {"stop"}
    for (context, rest), own, choice in zip(texts, logits, choices, strict=True):
        told = choice["logprobs"]
        expected = own.log_softmax(-1)[len(context) - 1 : -1]
        values = told["token_logprobs"][len(context) : -1]
        assert values == pytest.approx(
            [float(row[token]) for row, token in zip(expected, rest, strict=True)], abs=1e-3
        )
        is_greedy = [max(top.values()) for top in told["top_logprobs"][len(context) : -1]] == values
        assert is_greedy == (expected.argmax(-1).tolist() == rest)
