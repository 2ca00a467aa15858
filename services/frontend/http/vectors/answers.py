"""Answers with vectors, rankings and scores."""

from typing import Literal, NotRequired

from typing_extensions import TypedDict


class VectorUsage(TypedDict):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class Embedding(TypedDict):
    """A vector: numbers, or their little-endian float32 in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(TypedDict):
    """The vectors of a request."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: VectorUsage


class RankedText(TypedDict):
    """A document."""

    text: str


class RankedDocument(TypedDict):
    """A document's place in the request and its score."""

    index: int
    relevance_score: float
    document: NotRequired[RankedText]


class Ranking(TypedDict):
    """The documents with the best scores, best first."""

    id: str
    model: str
    usage: VectorUsage
    results: list[RankedDocument]


class PairScore(TypedDict):
    """A pair's score."""

    object: Literal["score"]
    index: int
    score: float


class ScoreList(TypedDict):
    """The scores of a request."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PairScore]
    usage: VectorUsage
