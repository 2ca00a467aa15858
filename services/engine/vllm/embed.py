"""Embed messages, as calls of the engine."""

import uuid
from collections.abc import Iterator

import numpy as np
from smg_grpc_proto.generated.vllm_engine_pb2 import EmbedRequest, EmbedResponse

from protos.engine.v1.engine_pb2 import Submit
from services.engine.edge.pooled_call import PooledPrompt
from services.engine.edge.request_reader import check_known


def prompts_of(message: EmbedRequest) -> Iterator[Submit]:
    """Yields the message's prompt.

    Raises:
        UnsupportedError: a field is not known.
    """
    check_known(message)
    yield Submit(
        request_id=message.request_id or uuid.uuid4().hex,
        prompt_token_ids=np.array(message.tokenized.input_ids, "<u4").tobytes(),
    )


def response_of(pooled: PooledPrompt) -> EmbedResponse:
    """Returns the answer with a prompt's vector."""
    return EmbedResponse(
        embedding=pooled.vector,
        prompt_tokens=pooled.num_tokens,
        embedding_dim=len(pooled.vector),
    )
