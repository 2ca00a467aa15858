"""A decoder that runs as modules of transformers, through both services."""

import asyncio

import grpc
import pytest

from protos.common.v1 import sampling_pb2
from protos.frontend.v1 import frontend_pb2, frontend_pb2_grpc
from tests.support.foreign_checkpoints import generate, write_foreign_checkpoint
from tests.support.processes import ServiceFailedError, stack, start_engine
from tests.support.transformers_reference import TransformersReference

TEXTS = ("The cat sat", "One two three", "A")
NUM_TOKENS = 24


async def _ask(address: str, text: str) -> list[int]:
    options = frontend_pb2.GenerationOptions(
        sampling=sampling_pb2.SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    )
    async with grpc.aio.insecure_channel(address) as channel:
        stub = frontend_pb2_grpc.FrontendServiceStub(channel)
        request = frontend_pb2.GenerateRequest(options=options, text=text)
        outputs = [response.output async for response in stub.Generate(request)]
    return [token for output in outputs for token in output.token_ids]


async def _ask_all(address: str) -> list[list[int]]:
    return await asyncio.gather(*(_ask(address, text) for text in TEXTS))


@pytest.mark.parametrize("level", [0, 3])
def test_both_services_give_the_tokens_of_transformers(level, tmp_path):
    model = write_foreign_checkpoint(tmp_path, "StableLmForCausalLM", has_tokenizer=True)
    encode = TransformersReference(tmp_path).encode
    expected = [generate(model, encode(text, is_chat=False), NUM_TOKENS) for text in TEXTS]
    flags = {"model": tmp_path, "compilation_level": level, "num_kv_blocks": 64}
    with stack(engine={**flags, "log_format": "json"}) as services:
        assert asyncio.run(_ask_all(services.frontend.address)) == expected
        assert '"model_impl": "transformers 5.' in services.engine.log


def test_an_engine_that_cannot_serve_a_model_says_why_in_one_line(tmp_path):
    write_foreign_checkpoint(tmp_path, "StableLmForCausalLM", has_tokenizer=True)
    with (
        pytest.raises(ServiceFailedError, match="not supported by --model-impl octavo"),
        start_engine(model=tmp_path, model_impl="octavo"),
    ):
        pass
