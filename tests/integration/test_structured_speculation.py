"""Requests that follow a grammar, beside others, in an engine whose model really drafts."""

import asyncio
import json
import shutil

import jsonschema
import pytest

from protos.engine.v1.batch_pb2 import GraphKind
from services.client.client import OctavoClient
from services.client.requests import Message, Options, Reply, Sampling
from services.client.responses import FinishReason
from services.client.structured_output import StructuredOutput
from services.engine.config.checkpoint import TINY_CHECKPOINT
from tests.support.draft_checkpoints import write_draft_checkpoint
from tests.support.engine_client import engine_stub, generate, get_stats
from tests.support.processes import stack

SCHEMA = {
    "type": "object",
    "properties": {
        "answer": {"type": "integer", "minimum": -99, "maximum": 99},
        "sure": {"type": "boolean"},
        "words": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 2},
    },
    "required": ["answer", "sure", "words"],
    "additionalProperties": False,
}
WHITESPACE_FREE = json.dumps({**SCHEMA, "x-guidance": {"whitespace_flexible": False}})
"""Random weights would else fill an output with spaces."""
LIMITS = {"max_model_len": 256, "max_num_seqs": 6, "num_kv_blocks": 120, "block_size": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint with draft layers that speaks the embedded model's tokens."""
    folder = tmp_path_factory.mktemp("drafting")
    tiny = json.loads((TINY_CHECKPOINT / "config.json").read_text())
    write_draft_checkpoint(
        folder,
        agreement=0.98,
        vocab_size=tiny["vocab_size"],
        eos_token_id=tiny["eos_token_id"],
        max_position_embeddings=256,
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_CHECKPOINT / name, folder)
    return folder


def wishes():
    """Prompts and options: every other request follows the schema."""
    made = []
    for index in range(10):
        schema = StructuredOutput(json_schema=WHITESPACE_FREE) if index % 2 else None
        sampling = Sampling(
            seed=index,
            temperature=0.0 if index < 4 else 1.0,
            max_tokens=120 if index % 2 else 40,
            ignore_eos=index % 2 == 0,
            structured_output=schema,
        )
        made.append((f"Number {index}, once upon a time", Options(sampling=sampling)))
    return made


async def with_forbidden_sequences(stub):
    """Returns outputs without a sequence that each would have, beside the sequences."""
    made = []
    for size in (1, 2, 3, 5):
        prompt, sampling = [5, 6, 7, 8 + size], {"max_tokens": 40, "ignore_eos": True}
        sequence = (await generate(stub, prompt, **sampling)).token_ids[7 : 7 + size]
        forbidden = [{"token_ids": sequence}]
        reply = await generate(stub, prompt, **sampling, forbidden_sequences=forbidden)
        made.append((reply.token_ids, sequence))
    return made


async def serve(folder, **flags):
    """Returns the answers to all wishes at once, those without sequences, and the figures."""
    flags = {**LIMITS, "model": folder, "device": "cpu", **flags}
    with stack(engine=flags) as services:
        async with OctavoClient(services.frontend.address) as client:
            calls = (client.generate(prompt, wish).completion() for prompt, wish in wishes())
            answers = await asyncio.gather(*calls)
        async with engine_stub(services.engine.address) as stub:
            return answers, await with_forbidden_sequences(stub), await get_stats(stub)


async def test_constrained_output_is_valid_and_that_of_an_engine_without_drafts(folder):
    plain, ruled, stats = await serve(folder)
    assert stats.num_verifications == 0
    graphs = {"cudagraph_mode": "full_decode_only", "capture_while_serving": False}
    speculated, ruled_too, stats = await serve(
        folder, num_speculative_tokens=3, min_speculative_tokens=3, **graphs
    )
    assert [each.text for each in speculated] == [each.text for each in plain]
    assert [each.token_ids for each in speculated] == [each.token_ids for each in plain]
    assert ruled_too == ruled
    for token_ids, sequence in ruled:
        spans = [token_ids[i : i + len(sequence)] for i in range(len(token_ids))]
        assert sequence not in spans
        assert len(token_ids) == 40
    constrained = speculated[1::2]
    assert {each.finish_reason for each in constrained} == {FinishReason.STOP}
    for each in constrained:
        jsonschema.validate(json.loads(each.text), SCHEMA)
    assert len({each.text for each in constrained}) > 1
    assert 0 < stats.accepted_draft_tokens < stats.draft_tokens
    assert (
        sum(each.num_replays for each in stats.graphs if each.kind == GraphKind.GRAPH_KIND_DRAFT)
        > 0
    )


async def test_a_budget_of_reasoning_ends_it_exactly_beside_drafts(folder, tmp_path):
    reasoning = tmp_path / "reasoning"
    shutil.copytree(folder, reasoning)
    path = reasoning / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] = (
        "{% for m in messages %}{{ m.content }}{% endfor %}<think>{# </think> #}"
    )
    path.write_text(json.dumps(config))
    flags = {
        **LIMITS,
        "model": reasoning,
        "device": "cpu",
        "num_speculative_tokens": 3,
        "min_speculative_tokens": 3,
    }
    with stack(engine=flags) as services:
        async with OctavoClient(services.frontend.address) as client:

            async def ask(seed, form):
                sampling = Sampling(
                    seed=seed,
                    temperature=0,
                    max_tokens=60,
                    ignore_eos=form is None,
                    structured_output=form,
                )
                message = Message(role="user", content=f"Once, {seed} foxes")
                reply = Reply(max_reasoning_tokens=20 + seed)
                options = Options(sampling=sampling)
                return await client.chat([message], options, reply=reply).completion()

            forms = [StructuredOutput(choice=["yes", "no"]) if i % 2 else None for i in range(6)]
            answers = await asyncio.gather(*(ask(i, form) for i, form in enumerate(forms)))
        async with engine_stub(services.engine.address) as stub:
            stats = await get_stats(stub)
    for seed, (answer, form) in enumerate(zip(answers, forms, strict=True)):
        assert answer.usage.reasoning_tokens == 20 + seed
        assert answer.text in (["yes", "no"] if form else [answer.text])
        assert len(answer.token_ids) == 60 or form
    assert 0 < stats.accepted_draft_tokens < stats.draft_tokens
