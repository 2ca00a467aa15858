"""Requests for vectors and scores and their answers, in plain Python."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from protos.frontend.v1 import frontend_pb2
from services.client.requests import fits
from services.client.responses import Usage, usage_of


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorOptions:
    """Options of a request for vectors or scores. None and empty mean the server's defaults."""

    truncate_tokens: Annotated[
        int | None, "Most tokens of an input, which keeps its first ones; a longer one is refused."
    ] = None
    model: Annotated[str, "The model wanted; empty means the one served."] = ""
    request_id: Annotated[str, "Names the request in the servers' logs; drawn when empty."] = ""
    priority: Annotated[int, "Higher runs first."] = 0
    cache_salt: Annotated[str, "Requests with different salts share no cached blocks."] = ""

    def to_proto(self) -> frontend_pb2.VectorOptions:
        """Returns the wire form.

        Raises:
            InvalidRequestError: a value does not fit its field.
        """
        options = frontend_pb2.VectorOptions(
            model=self.model, request_id=self.request_id, cache_salt=self.cache_salt
        )
        with fits("priority", self.priority):
            options.priority = self.priority
        if self.truncate_tokens is not None:
            with fits("truncate_tokens", self.truncate_tokens):
                options.truncate_tokens = self.truncate_tokens
        return options


@dataclass(frozen=True, slots=True, kw_only=True)
class Vectors:
    """The vectors of inputs, in their order."""

    vectors: Sequence[Sequence[float]]
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The scores of documents, in their order; the larger, the better."""

    scores: Sequence[float]
    usage: Usage


def embed_request(
    inputs: Sequence[str | Sequence[int]],
    options: VectorOptions,
    *,
    dimensions: int | None,
    prompt_name: str | None,
) -> frontend_pb2.EmbedRequest:
    """Returns the wire form of texts and lists of token ids.

    Raises:
        InvalidRequestError: a value does not fit its field.
    """
    request = frontend_pb2.EmbedRequest(options=options.to_proto(), prompt_name=prompt_name)
    if dimensions is not None:
        with fits("dimensions", dimensions):
            request.dimensions = dimensions
    for each in inputs:
        if isinstance(each, str):
            request.inputs.add(text=each)
        else:
            with fits("a token id of an input", each):
                request.inputs.add().tokens.ids.extend(each)
    return request


def vectors_of(response: frontend_pb2.EmbedResponse) -> Vectors:
    """Reads an answer."""
    vectors = list(struct.iter_unpack(f"<{response.size}f", response.vectors))
    return Vectors(vectors=vectors, usage=usage_of(response.usage))


def scores_of(response: frontend_pb2.ScoreResponse) -> Scores:
    """Reads an answer."""
    return Scores(scores=list(response.scores), usage=usage_of(response.usage))
