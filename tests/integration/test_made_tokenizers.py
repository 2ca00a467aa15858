"""A checkpoint whose tokenizer is no tokenizer.json, over both services."""

import grpc
import httpx
import pytest
import tokenizers

from protos.common.v1 import sampling_pb2
from protos.frontend.v1 import frontend_pb2, frontend_pb2_grpc
from services.engine.config.checkpoint import TINY_CHECKPOINT
from tests.support.processes import free_port, stack
from tests.support.tiktoken_folder import write_tiktoken_folder


@pytest.fixture(scope="module")
def services(tmp_path_factory):
    folder = write_tiktoken_folder(tmp_path_factory.mktemp("model") / "ranks")
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


def test_scores_take_the_answers_of_the_made_vocabulary(tmp_path):
    folder = write_tiktoken_folder(tmp_path / "ranks", {900: "no", 901: "yes"})
    port, body = free_port(), {"model": "m", "text_1": "a bird", "text_2": ["red", "a river"]}
    scores = []
    for tokens in ([], [901, 900]):
        engine = {"model": folder, "task": "score", "served_model_name": "m"}
        if tokens:
            engine["score_tokens"] = ",".join(map(str, tokens))
        with stack(engine=engine, frontend={"http_port": port}):
            answer = httpx.post(f"http://127.0.0.1:{port}/v1/score", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        scores.append([each["score"] for each in answer.json()["data"]])
    assert scores[1] == pytest.approx([1 - score for score in scores[0]], abs=1e-4)
