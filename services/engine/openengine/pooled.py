"""Embed and Score messages of OpenEngine, as calls of the engine."""

import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import grpc
import numpy as np

from models.config_sections.pooling import PoolingConfig, Task
from protos.engine.v1.engine_pb2 import Submit
from protos.openengine.v1 import openengine_pb2
from protos.openengine.v1.openengine_pb2 import (
    DenseFloatTensor,
    EmbedCapabilities,
    EmbeddingOutput,
    EmbedRequest,
    EmbedResponse,
    ScoreCandidateOutput,
    ScoreCapabilities,
    ScoreGroup,
    ScoreGroupOutput,
    ScoreNormalization,
    ScoreRequest,
    ScoreResponse,
    TaskCapabilities,
    TaskInput,
    TaskRequestContext,
    TaskUsage,
    TaskValueSemantics,
)
from services.engine.batch import Float32Array
from services.engine.checkpoint.model_folder import ModelFolder
from services.engine.config.engine_config import EngineConfig
from services.engine.edge.pooled_call import PooledPrompt
from services.engine.edge.request_reader import MAX_REQUEST_ID_LENGTH, check_name
from services.engine.errors import InvalidRequestError, UnsupportedError
from services.engine.openengine.message import priority_of
from services.engine.openengine.requests import check_served

MAX_PROMPTS = 2048
"""Prompts of one call: inputs, or pairs of a query and a candidate."""
_SEQUENCE = openengine_pb2.TASK_OUTPUT_GRANULARITY_SEQUENCE
_SHORTEST = np.float32(1e-12)

MessageT = TypeVar("MessageT", EmbedRequest, ScoreRequest)
ResponseT = TypeVar("ResponseT")


class PooledMessage(ABC, Generic[MessageT, ResponseT]):
    """A message that asks for vectors of prompts."""

    def __init__(
        self, message: MessageT, model: ModelFolder, call: grpc.aio.ServicerContext
    ) -> None:
        self._message: MessageT = message
        self._model = model
        self._call = call

    @property
    def context(self) -> TaskRequestContext:
        """Names the request."""
        return self._message.context

    @abstractmethod
    def prompts(self) -> Iterator[Submit]:
        """Yields the prompts, or refuses the message."""

    @abstractmethod
    def response(self, pooled: Sequence[PooledPrompt]) -> ResponseT:
        """Returns the answer, given the vectors of all prompts."""


class EmbedMessage(PooledMessage[EmbedRequest, EmbedResponse]):
    """Reads an Embed message and answers it."""

    def prompts(self) -> Iterator[Submit]:
        """Yields the inputs.

        Raises:
            InvalidRequestError, UnsupportedError: the message is not served.
        """
        message, options = self._message, self._message.options
        check_served(message)
        pooling = _pooling_for(self._model, "embed")
        _check_granularity(options.granularity)
        if options.encoding == openengine_pb2.EMBEDDING_ENCODING_SPARSE:
            raise UnsupportedError("encoding is sparse: vectors are dense")
        if options.HasField("normalize") and options.normalize != pooling.is_normalized:
            does = "has" if pooling.is_normalized else "does not have"
            raise UnsupportedError(
                f"normalize is {options.normalize}: the model {does} vectors of length 1"
            )
        size = pooling.size(self._model.config.hidden_size)
        if options.HasField("dimensions") and not 1 <= options.dimensions <= size:
            raise InvalidRequestError(
                f"dimensions is {options.dimensions}; the model's vectors have {size}"
            )
        _check_ids("item_id", [each.item_id for each in message.inputs])
        for each in message.inputs:
            _tokens_of(each)
        prompts = map(_packed, message.inputs)
        yield from _submits(message.context, prompts, priority_of(self._call))

    def response(self, pooled: Sequence[PooledPrompt]) -> EmbedResponse:
        """Returns the answer with all vectors."""
        options, pooling = self._message.options, self._model.pooling
        assert pooling is not None, "prompts has checked it"
        outputs = []
        for index, (each, own) in enumerate(zip(self._message.inputs, pooled, strict=True)):
            vector = own.vector
            if options.HasField("dimensions") and options.dimensions < len(vector):
                vector = _shortened(vector, options.dimensions, pooling)
            outputs.append(
                EmbeddingOutput(
                    item_id=each.item_id,
                    input_index=index,
                    granularity=_SEQUENCE,
                    dense=DenseFloatTensor(shape=[len(vector)], values=vector),
                )
            )
        return EmbedResponse(
            request_id=self.context.request_id, outputs=outputs, usage=_usage(pooled)
        )


class ScoreMessage(PooledMessage[ScoreRequest, ScoreResponse]):
    """Reads a Score message and answers it.

    A prompt is the tokens of a query and then those of a candidate: the caller, who has the
    tokenizer, writes the model's template into both.
    """

    def prompts(self) -> Iterator[Submit]:
        """Yields each query with each of its candidates.

        Raises:
            InvalidRequestError, UnsupportedError: the message is not served.
        """
        message, options = self._message, self._message.options
        check_served(message)
        pooling = _pooling_for(self._model, "score")
        _check_granularity(options.granularity)
        for name, wanted, own in (
            ("output_semantics", options.output_semantics, semantics_of(pooling)),
            ("normalization", options.normalization, normalization_of(pooling)),
        ):
            if wanted not in (0, own):
                raise UnsupportedError(f"{name} is {wanted}: scores of the model have {own}")
        if options.label_token_ids:
            raise UnsupportedError("label_token_ids is not served: --score-tokens names the labels")
        if options.instruction:
            raise UnsupportedError("instruction is not served: it is part of the query's tokens")
        _check_ids("group_id", [each.group_id for each in message.groups])
        _check_count(sum(len(each.candidates) for each in message.groups))
        for group in message.groups:
            _check_group(group)
        prompts = (pair for group in message.groups for pair in _pairs_of(group))
        yield from _submits(message.context, prompts, priority_of(self._call))

    def response(self, pooled: Sequence[PooledPrompt]) -> ScoreResponse:
        """Returns the answer with all scores."""
        pooling = self._model.pooling
        assert pooling is not None, "prompts has checked it"
        remaining = iter(pooled)
        groups = [
            ScoreGroupOutput(
                group_id=group.group_id,
                group_index=index,
                candidates=[
                    ScoreCandidateOutput(
                        candidate_id=each.item_id,
                        candidate_index=place,
                        scores=DenseFloatTensor(shape=[1], values=next(remaining).vector),
                    )
                    for place, each in enumerate(group.candidates)
                ],
            )
            for index, group in enumerate(self._message.groups)
        ]
        return ScoreResponse(
            request_id=self.context.request_id,
            groups=groups,
            granularity=_SEQUENCE,
            semantics=semantics_of(pooling),
            higher_is_better=True,
            normalization=normalization_of(pooling),
            usage=_usage(pooled),
        )


def task_capabilities(
    pooling: PoolingConfig, model: ModelFolder, config: EngineConfig
) -> TaskCapabilities:
    """Describes what requests for vectors, or for scores, may ask for."""
    common: dict[str, Any] = {
        "supported": True,
        "input_types": [openengine_pb2.TASK_INPUT_TYPE_TOKEN_IDS],
        "granularities": [_SEQUENCE],
        "supports_priority": True,
        "supports_lora": config.adapters.max_loras > 0,
    }
    if pooling.task == "embed":
        return TaskCapabilities(
            embed=EmbedCapabilities(
                **common,
                encodings=[openengine_pb2.EMBEDDING_ENCODING_DENSE],
                dimension=pooling.size(model.config.hidden_size),
                max_batch_size=MAX_PROMPTS,
                supports_normalization=pooling.is_normalized,
                supports_dimension_override=True,
            )
        )
    return TaskCapabilities(
        score=ScoreCapabilities(
            **common,
            semantics=[semantics_of(pooling)],
            normalizations=[normalization_of(pooling)],
            supports_label_token_scoring=False,
            supports_instruction=False,
            max_groups=MAX_PROMPTS,
            max_candidates_per_group=MAX_PROMPTS,
            higher_is_better=True,
        )
    )


def semantics_of(pooling: PoolingConfig) -> TaskValueSemantics:
    """Returns the meaning of a model's scores."""
    if pooling.answers is None and pooling.activation == "identity":
        return openengine_pb2.TASK_VALUE_SEMANTICS_LOGITS
    return openengine_pb2.TASK_VALUE_SEMANTICS_PROBABILITIES


def normalization_of(pooling: PoolingConfig) -> ScoreNormalization:
    """Returns whether a model's score is one part of a softmax."""
    if pooling.answers is None:
        return openengine_pb2.SCORE_NORMALIZATION_NONE
    return openengine_pb2.SCORE_NORMALIZATION_SOFTMAX


def _pooling_for(model: ModelFolder, task: Task) -> PoolingConfig:
    pooling = model.pooling
    if pooling is None or pooling.task != task:
        does = "generate" if pooling is None else pooling.task
        raise UnsupportedError(
            f"model {model.name!r} is served with --task {does}; this needs --task {task}"
        )
    return pooling


def _check_granularity(granularity: int) -> None:
    if granularity not in (0, _SEQUENCE):
        raise UnsupportedError("granularity is token: an input has one value")


def _check_count(count: int) -> None:
    if not 1 <= count <= MAX_PROMPTS:
        raise InvalidRequestError(f"there are {count} inputs; there must be 1 to {MAX_PROMPTS}")


def _check_ids(name: str, ids: Sequence[str]) -> None:
    """Refuses no entries, too many, and entries that answers could not name."""
    _check_count(len(ids))
    _check_names(name, ids)


def _check_names(name: str, ids: Sequence[str]) -> None:
    for each in ids:
        check_name(each, name, MAX_REQUEST_ID_LENGTH)
    if "" in ids or len(set(ids)) < len(ids):
        raise InvalidRequestError(f"each {name} must be there, and of one entry alone")


def _tokens_of(given: TaskInput) -> Sequence[int]:
    if given.WhichOneof("input") != "token_ids":
        raise UnsupportedError("the engine takes tokens: send token_ids")
    return given.token_ids.ids


def _check_group(group: ScoreGroup) -> None:
    items = [group.query, *group.candidates]
    _check_count(len(group.candidates))
    _check_names("item_id of a group", [each.item_id for each in items])
    for each in items:
        _tokens_of(each)


def _pairs_of(group: ScoreGroup) -> Iterator[bytes]:
    query = _packed(group.query)
    for each in group.candidates:
        yield query + _packed(each)


def _packed(given: TaskInput) -> bytes:
    """Returns an input's tokens as a Submit has them."""
    return np.array(_tokens_of(given), "<u4").tobytes()


def _submits(
    context: TaskRequestContext, prompts: Iterable[bytes], priority: int
) -> Iterator[Submit]:
    request_id = context.request_id or uuid.uuid4().hex
    for index, packed in enumerate(prompts):
        yield Submit(
            request_id=request_id if index == 0 else f"{request_id}#{index}",
            prompt_token_ids=packed,
            priority=priority,
            adapter=context.lora_name,
        )


def _shortened(vector: Float32Array, size: int, pooling: PoolingConfig) -> Float32Array:
    """Returns the first elements of a vector, of length 1 again if the model's vectors are.

    Source: Kusupati et al. 2022, "Matryoshka Representation Learning".
    """
    shorter = vector[:size]
    if not pooling.is_normalized:
        return shorter
    result: Float32Array = shorter / np.maximum(np.linalg.norm(shorter), _SHORTEST)
    return result


def _usage(pooled: Sequence[PooledPrompt]) -> TaskUsage:
    return TaskUsage(
        input_tokens=sum(each.num_tokens for each in pooled),
        cached_input_tokens=sum(each.num_cached_tokens for each in pooled),
    )
