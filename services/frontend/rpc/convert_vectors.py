"""Converts requests for vectors and scores from protobuf."""

import uuid

from protos.frontend.v1 import frontend_pb2
from services.frontend.errors import InvalidRequestError
from services.frontend.pipeline.prompt_size import check_num_tokens
from services.frontend.pipeline.vectors import MAX_INPUTS, VectorOptions


def vector_options_of(
    request: frontend_pb2.EmbedRequest | frontend_pb2.ScoreRequest,
) -> VectorOptions:
    """Reads options, and makes a request id if there is none.

    Raises:
        InvalidRequestError: truncate_tokens leaves nothing.
    """
    given = request.options
    truncate = given.truncate_tokens if given.HasField("truncate_tokens") else None
    if truncate == 0:
        raise InvalidRequestError(
            "truncate_tokens is 0, which leaves no input; it must be at least 1",
            field="truncate_tokens",
        )
    is_embed = isinstance(request, frontend_pb2.EmbedRequest)
    own = ("dimensions", "prompt_name") if is_embed else ("instruction",)
    return VectorOptions(
        model=given.model,
        request_id=given.request_id or uuid.uuid4().hex,
        priority=given.priority,
        cache_salt=given.cache_salt,
        truncate_tokens=truncate,
        **{name: getattr(request, name) for name in own if request.HasField(name)},
    )


def inputs_of(request: frontend_pb2.EmbedRequest, *, max_tokens: int) -> list[str | list[int]]:
    """Reads the inputs; token ids of `max_tokens` or more are refused unless they are cut.

    Raises:
        InvalidRequestError: there are too many, or one is missing or too long.
    """
    if len(request.inputs) > MAX_INPUTS:
        raise InvalidRequestError(
            f"there are {len(request.inputs)} inputs; there must be 1 to {MAX_INPUTS}",
            field="inputs",
        )
    inputs: list[str | list[int]] = []
    for index, each in enumerate(request.inputs):
        match each.WhichOneof("input"):
            case "text":
                inputs.append(each.text)
            case "tokens":
                if not request.options.HasField("truncate_tokens"):
                    check_num_tokens(len(each.tokens.ids), max_tokens)
                inputs.append(list(each.tokens.ids))
            case _:
                raise InvalidRequestError(f"input {index} is empty", field="inputs")
    return inputs


def pairs_of(request: frontend_pb2.ScoreRequest) -> list[tuple[str, str]]:
    """Reads the pairs.

    Raises:
        InvalidRequestError: the numbers of queries and documents do not fit.
    """
    queries, documents = list(request.queries), list(request.documents)
    if len(queries) not in (1, len(documents)) or len(documents) > MAX_INPUTS:
        raise InvalidRequestError(
            f"there are {len(queries)} queries and {len(documents)} documents; there must be one "
            f"query or as many, and at most {MAX_INPUTS} documents",
            field="queries",
        )
    if len(queries) == 1:
        queries *= len(documents)
    return list(zip(queries, documents, strict=True))
