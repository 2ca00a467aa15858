"""Vectors and scores of real services over HTTP, against transformers."""

from contextlib import asynccontextmanager

import httpx
import numpy as np
import openai
import pytest
import torch
from torch.nn.functional import normalize
from transformers import AutoModel

from services.engine.config.checkpoint import TINY_CHECKPOINT
from tests.support.processes import free_port, stack
from tests.support.scoring_checkpoint import write_scorer
from tests.support.transformers_reference import TransformersReference

TEXTS = ["a red bird", "Once upon a time there was a house.", "x", "What is 3 + 4? " * 40]
FLAGS = {"kv_cache_memory_mb": 16, "max_num_batched_tokens": 64, "served_model_name": "tiny"}


@asynccontextmanager
async def serving(task, model=TINY_CHECKPOINT, **flags):
    """Serves a model; yields the base URL."""
    port = free_port()
    engine = {**FLAGS, "task": task, "model": str(model), **flags}
    async with stack(engine=engine, frontend={"http_port": port}):
        yield f"http://127.0.0.1:{port}/v1"


@asynccontextmanager
async def openai_client(url):
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@torch.inference_mode()
def expected(reference, token_ids):
    states = reference.model.model(torch.tensor([token_ids])).last_hidden_state[0]
    return normalize(states[-1], dim=0).numpy()


async def test_the_openai_client_gets_the_vectors_of_texts_and_tokens():
    reference = TransformersReference(TINY_CHECKPOINT)
    tokens = [reference.encode(text, is_chat=False) for text in TEXTS]
    vectors = [expected(reference, each) for each in tokens]
    async with serving("embed") as url, openai_client(url) as client:
        create = client.embeddings.create
        base64 = await create(model="tiny", input=TEXTS)  # the client asks for base64
        plain = await create(model="tiny", input=tokens, encoding_format="float")
        one = await create(model="tiny", input=TEXTS[1], dimensions=16)
        single = await create(model="tiny", input=tokens[1])
        cut = await create(model="tiny", input=TEXTS[3], extra_body={"truncate_prompt_tokens": 7})
        with pytest.raises(openai.BadRequestError) as generation:
            await client.completions.create(model="tiny", prompt="x")
        with pytest.raises(openai.BadRequestError) as wide:
            await create(model="tiny", input="x", dimensions=193)
        with pytest.raises(openai.BadRequestError) as long:
            await create(model="tiny", input=["x", "word " * 3000])
        with pytest.raises(openai.NotFoundError):
            await create(model="other", input="x")
    for answer in (base64, plain):
        assert [each.index for each in answer.data] == [0, 1, 2, 3]
        found = np.array([each.embedding for each in answer.data])
        np.testing.assert_allclose(found, np.stack(vectors), atol=1e-4)
        assert answer.usage.prompt_tokens == sum(map(len, tokens)) == answer.usage.total_tokens
    shorter = vectors[1][:16] / np.linalg.norm(vectors[1][:16])
    np.testing.assert_allclose(one.data[0].embedding, shorter, atol=1e-4)
    np.testing.assert_allclose(single.data[0].embedding, vectors[1], atol=1e-4)
    np.testing.assert_allclose(cut.data[0].embedding, expected(reference, tokens[3][:7]), atol=1e-4)
    assert "is served with --task embed: it generates no tokens" in generation.value.message
    assert wide.value.param == "dimensions"
    assert (long.value.param, long.value.code) == ("input", "context_length_exceeded")
    assert "input 1 has" in long.value.message


async def test_documents_are_ranked_and_pairs_scored(tmp_path):
    head = write_scorer(tmp_path)
    reference = TransformersReference(TINY_CHECKPOINT)
    query, documents = "Which bird is red?", TEXTS[:3]
    async with (
        serving("score", tmp_path) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        body = {"model": "tiny", "query": query, "documents": documents}
        ranking = (await client.post("/rerank", json=body)).json()
        best = (
            await client.post("/rerank", json=body | {"top_n": 1, "return_documents": False})
        ).json()
        scores = (await client.post("/score", json={"text_1": query, "text_2": documents})).json()
        embeddings = await client.post("/embeddings", json={"model": "tiny", "input": "x"})
    by_index = [each["score"] for each in scores["data"]]
    ranked = ranking["results"]
    order = sorted(range(3), key=lambda index: -by_index[index])
    assert [each["index"] for each in ranked] == order
    for each in ranked:
        assert each["relevance_score"] == pytest.approx(by_index[each["index"]], abs=1e-5)
    assert {each["index"]: each["document"]["text"] for each in ranked} == dict(
        enumerate(documents)
    )
    [top] = best["results"]
    assert set(top) == {"index", "relevance_score"}
    assert top["index"] == order[0]
    assert len(set(by_index)) == 3
    assert embeddings.status_code == 400
    assert embeddings.json()["error"]["message"].endswith("this needs one with --task embed")
    model = AutoModel.from_pretrained(TINY_CHECKPOINT, dtype=torch.float32).eval()
    for document, score in zip(documents, by_index, strict=True):
        token_ids = scored_tokens(reference, query, document)
        with torch.inference_mode():
            state = model(torch.tensor([token_ids])).last_hidden_state[0, -1]
        assert score == pytest.approx(torch.sigmoid(head @ state).item(), abs=1e-4)


def scored_tokens(reference, query, document):
    """The input of Qwen3-Reranker's model card, in which texts have no special tokens."""
    prefix = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query"
        ' and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n"
    )
    suffix = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    instruction = "Given a web search query, retrieve relevant passages that answer the query"
    text = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    return [
        token_id
        for part in (prefix, text, suffix)
        for token_id in reference.tokenizer(part, add_special_tokens=False)["input_ids"]
    ]
