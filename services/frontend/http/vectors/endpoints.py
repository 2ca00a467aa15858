"""The endpoints that answer with vectors, rankings and scores."""

import asyncio
import base64
import json
import time
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from services.frontend.access.caller import Lease
from services.frontend.engine_client.messages import Usage
from services.frontend.http.endpoint import RecordedEndpoint
from services.frontend.http.vectors.answers import (
    PairScore,
    RankedDocument,
    Ranking,
    ScoreList,
    VectorUsage,
)
from services.frontend.http.vectors.calls import (
    AnyVectorCall,
    EmbeddingsCall,
    ScoreCall,
    VectorCall,
)
from services.frontend.http.wire.writer import ResponseWriter
from services.frontend.pipeline.request_log import RequestRecord
from services.frontend.pipeline.vectors import Matrix


class VectorEndpoint(RecordedEndpoint[AnyVectorCall]):
    """An endpoint that computes vectors, and answers with all of them at once."""

    def model_name(self, call: VectorCall) -> str:
        """Returns the name of the served model."""
        return self.pipeline.models.named(call.vector_options.model).name


class EmbeddingsEndpoint(VectorEndpoint[EmbeddingsCall]):
    """Answers with the vectors of texts, as OpenAI's API does."""

    async def answer(
        self, call: EmbeddingsCall, writer: ResponseWriter, record: RequestRecord, lease: Lease
    ) -> None:
        """Runs a parsed request and writes its answer."""
        vectors = await self.pipeline.vectors.embed(
            call.inputs, call.vector_options, record=record, lease=lease
        )
        data = await _embeddings_in_json(vectors.matrix, is_base64=call.is_base64)
        model = json.dumps(self.model_name(call))
        usage = json.dumps(_usage(vectors.usage))
        # An EmbeddingList, which is encoded vector by vector.
        await writer.write_json(
            f'{{"object":"list","data":[{data}],"model":{model},"usage":{usage}}}'
        )


class ScoringEndpoint(VectorEndpoint[ScoreCall]):
    """An endpoint that scores pairs."""

    async def answer(
        self, call: ScoreCall, writer: ResponseWriter, record: RequestRecord, lease: Lease
    ) -> None:
        """Runs a parsed request and writes its answer."""
        vectors = await self.pipeline.vectors.score(
            call.pairs, call.vector_options, record=record, lease=lease
        )
        scores: list[float] = vectors.matrix[:, 0].tolist()
        await writer.write(self.scored(call, scores, _usage(vectors.usage)))

    @abstractmethod
    def scored(self, call: ScoreCall, scores: list[float], usage: VectorUsage) -> Mapping[str, Any]:
        """Returns the answer with the scores of a request's pairs."""


class RerankEndpoint(ScoringEndpoint):
    """Answers with documents in the order of their scores, as Jina's and Cohere's APIs do."""

    def scored(self, call: ScoreCall, scores: list[float], usage: VectorUsage) -> Ranking:
        """Returns the best documents, best first."""
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        results: list[RankedDocument] = []
        for index in order[: call.num_shown]:
            result: RankedDocument = {"index": index, "relevance_score": scores[index]}
            if call.has_documents:
                result["document"] = {"text": call.pairs[index][1]}
            results.append(result)
        return {
            "id": call.options.request_id,
            "model": self.model_name(call),
            "usage": usage,
            "results": results,
        }


class ScoreEndpoint(ScoringEndpoint):
    """Answers with the scores of pairs, as vLLM's server does."""

    def scored(self, call: ScoreCall, scores: list[float], usage: VectorUsage) -> ScoreList:
        """Returns the scores in the order of the pairs."""
        data: list[PairScore] = [
            {"object": "score", "index": index, "score": score}
            for index, score in enumerate(scores)
        ]
        return {
            "id": call.options.request_id,
            "object": "list",
            "created": int(time.time()),
            "model": self.model_name(call),
            "data": data,
            "usage": usage,
        }


async def _embeddings_in_json(matrix: Matrix, *, is_base64: bool) -> str:
    """Encodes vectors; other tasks run after each, which takes up to 2 ms."""
    parts = []
    for index, vector in enumerate(matrix):
        if is_base64:
            values = json.dumps(base64.b64encode(vector.astype("<f4").tobytes()).decode())
        else:
            values = json.dumps(vector.tolist(), separators=(",", ":"))
        parts.append(f'{{"object":"embedding","index":{index},"embedding":{values}}}')
        await asyncio.sleep(0)
    return ",".join(parts)


def _usage(usage: Usage) -> VectorUsage:
    return {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
