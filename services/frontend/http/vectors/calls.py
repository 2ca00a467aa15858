"""Bodies of POST /v1/embeddings, /v1/rerank and /v1/score, and the calls in them."""

from dataclasses import dataclass, replace
from typing import Annotated, Literal, TypeVar

from pydantic import Field

from services.frontend.errors import InvalidRequestError
from services.frontend.http.bodies.call import Call
from services.frontend.http.fields.body import Body
from services.frontend.http.fields.generation import Model, Tokens
from services.frontend.http.fields.inert import InertFields
from services.frontend.http.fields.options import ALL_THAT_FIT
from services.frontend.http.fields.parse import parse_body
from services.frontend.pipeline.prompt_size import MAX_PROMPT_TOKENS
from services.frontend.pipeline.request import MAX_CACHE_SALT_CHARACTERS, Options, Prompt
from services.frontend.pipeline.vectors import MAX_INPUTS, VectorOptions

_Texts = Annotated[list[str], Field(min_length=1, fail_fast=True)]


class VectorFields(InertFields):
    """Fields of all requests for vectors and scores."""

    model: Model | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**32 - 1)] | None = None
    """Most tokens of an input, which keeps its first ones; -1: as many as fit."""
    cache_salt: Annotated[str, Field(max_length=MAX_CACHE_SALT_CHARACTERS)] | None = None
    priority: Literal[0] | None = None


class EmbeddingsRequest(VectorFields):
    """Body of POST /v1/embeddings."""

    input: str | Tokens | _Texts | Annotated[list[Tokens], Field(min_length=1, fail_fast=True)]
    encoding_format: Literal["float", "base64"] | None = None
    """Absent: float."""
    dimensions: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    prompt_name: str | None = None
    """The model's prompt to put before texts; absent: its default one."""


class DocumentText(Body):
    """A document as an object."""

    text: str


class RerankRequest(VectorFields):
    """Body of POST /v1/rerank."""

    query: str
    documents: Annotated[
        list[str | DocumentText], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)
    ]
    top_n: Annotated[int, Field(ge=1)] | None = None
    """Absent: all."""
    return_documents: bool | None = None
    """Absent: true."""
    instruction: str | None = None
    max_tokens_per_doc: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    """Most tokens of each document, which keeps its first ones; absent: all."""


class ScoreRequest(VectorFields):
    """Body of POST /v1/score."""

    text_1: str | _Texts
    text_2: str | _Texts
    instruction: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorCall(Call):
    """A parsed request for vectors or scores, which is answered at once."""

    prompt: Prompt = ""
    vector_options: VectorOptions


AnyVectorCall = TypeVar("AnyVectorCall", bound=VectorCall)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingsCall(VectorCall):
    """A parsed request for vectors."""

    inputs: list[str | list[int]]
    is_base64: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreCall(VectorCall):
    """A parsed request for scores."""

    pairs: list[tuple[str, str]]
    num_shown: int
    """Documents of a ranking to return."""
    has_documents: bool = False


def read_embeddings(body: bytes, request_id: str, *, is_strict: bool = False) -> EmbeddingsCall:
    """Parses a request for vectors; see `ReadCall`."""
    request = parse_body(EmbeddingsRequest, body, is_strict=is_strict)
    inputs: list[str | list[int]]
    match request.input:
        case str() | [int(), *_] as single:
            inputs = [single]  # type: ignore[list-item]  # a text or a list of ids
        case several:
            inputs = several  # type: ignore[assignment]  # texts or lists of ids
    return EmbeddingsCall(
        options=Options(request_id=request_id),
        prompt_field="input",
        inputs=inputs,
        vector_options=replace(
            _options(request, request_id),
            dimensions=request.dimensions,
            prompt_name=request.prompt_name,
        ),
        is_base64=request.encoding_format == "base64",
    )


def read_rerank(body: bytes, request_id: str, *, is_strict: bool = False) -> ScoreCall:
    """Parses a request for a ranking; see `ReadCall`."""
    request = parse_body(RerankRequest, body, is_strict=is_strict)
    documents = [each if isinstance(each, str) else each.text for each in request.documents]
    return ScoreCall(
        options=Options(request_id=request_id),
        prompt_field="documents",
        pairs=[(request.query, each) for each in documents],
        vector_options=replace(
            _options(request, request_id),
            instruction=request.instruction,
            max_document_tokens=request.max_tokens_per_doc,
        ),
        num_shown=len(documents) if request.top_n is None else request.top_n,
        has_documents=request.return_documents is not False,
    )


def read_score(body: bytes, request_id: str, *, is_strict: bool = False) -> ScoreCall:
    """Parses a request for scores; see `ReadCall`."""
    request = parse_body(ScoreRequest, body, is_strict=is_strict)
    first, second = request.text_1, request.text_2
    queries = [first] if isinstance(first, str) else first
    documents = [second] if isinstance(second, str) else second
    if len(queries) not in (1, len(documents)):
        raise InvalidRequestError(
            f"text_1 has {len(queries)} texts and text_2 {len(documents)}; text_1 must have one, or"
            " as many",
            field="text_1",
        )
    if len(queries) == 1:
        queries = queries * len(documents)
    return ScoreCall(
        options=Options(request_id=request_id),
        prompt_field="text_2",
        pairs=list(zip(queries, documents, strict=True)),
        vector_options=replace(_options(request, request_id), instruction=request.instruction),
        num_shown=len(documents),
    )


def _options(request: VectorFields, request_id: str) -> VectorOptions:
    """Returns the options that all requests have.

    Raises:
        InvalidRequestError: truncate_prompt_tokens leaves nothing.
    """
    most = request.truncate_prompt_tokens
    if most == 0:
        raise InvalidRequestError(
            "truncate_prompt_tokens is 0, which leaves no input; it must be at least 1, or -1",
            field="truncate_prompt_tokens",
        )
    return VectorOptions(
        model=request.model or "",
        request_id=request_id,
        cache_salt=request.cache_salt or "",
        truncate_tokens=MAX_PROMPT_TOKENS if most == ALL_THAT_FIT else most,
    )
