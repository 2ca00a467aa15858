"""A checkpoint whose tokenizer is no tokenizer.json, over both services."""

import base64
import json
import shutil

import grpc
import pytest
import tokenizers

from models.tokenizers.byte_ranks import spelled
from protos.common.v1 import sampling_pb2
from protos.frontend.v1 import frontend_pb2, frontend_pb2_grpc
from services.engine.config.checkpoint import TINY_CHECKPOINT
from tests.support.processes import stack


@pytest.fixture(scope="module")
def services(tmp_path_factory):
    """The tiny model with its vocabulary as ranks, as Kimi's checkpoints have theirs."""
    folder = tmp_path_factory.mktemp("model") / "ranks"
    shutil.copytree(TINY_CHECKPOINT, folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").unlink()
    special = {each["content"]: each["id"] for each in content["added_tokens"]}
    octets = {spelled(bytes([byte])): byte for byte in range(256)}
    lines = [
        b"%s %d\n" % (base64.b64encode(bytes(octets[each] for each in text)), rank)
        for text, rank in content["model"]["vocab"].items()
        if text not in special
    ]
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] = {
        str(token_id): {"content": text, "special": True} for text, token_id in special.items()
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with stack(engine={"model": folder}) as both:
        yield both


def test_a_chat_has_the_prompt_and_the_text_of_the_same_vocabulary(services):
    library = tokenizers.Tokenizer.from_file(str(TINY_CHECKPOINT / "tokenizer.json"))
    options = frontend_pb2.GenerationOptions(
        sampling=sampling_pb2.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    )
    message = frontend_pb2.ChatMessage(role="user", content="say where the river ends")
    with grpc.insecure_channel(services.frontend.address) as channel:
        stub = frontend_pb2_grpc.FrontendServiceStub(channel)
        request = frontend_pb2.ChatRequest(options=options, messages=[message])
        outputs = [each.output for each in stub.Chat(request)]
        prompt = "<|im_start|>user\nsay where the river ends<|im_end|>\n<|im_start|>assistant\n"
        found = stub.Tokenize(frontend_pb2.TokenizeRequest(text=prompt))
    assert list(found.token_ids) == library.encode(prompt).ids
    token_ids = [token for output in outputs for token in output.token_ids]
    assert len(token_ids) == 12
    assert "".join(output.text for output in outputs) == library.decode(token_ids)
    assert outputs[-1].usage.prompt_tokens == len(found.token_ids)
