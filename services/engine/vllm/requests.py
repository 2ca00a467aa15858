"""Converts VllmEngine requests to the engine's own, and refuses unsupported fields.

Absent fields are neutral: temperature 1, no truncation, no penalties. GetModelInfo has the model's
defaults; the caller applies them.
"""

import uuid
from collections.abc import Iterator

from google.protobuf.message import Message
from smg_grpc_proto.generated import vllm_engine_pb2

from protos.common.v1.sampling_pb2 import SamplingParams, StructuredOutput, TextChoice
from protos.engine.v1.engine_pb2 import GenerateRequest
from services.engine.edge.call import MAX_SAMPLES, SEEDS, check_lengths, samples_of
from services.engine.edge.request_reader import check_known
from services.engine.edge.stop_strings import StopRule
from services.engine.edge.structured_output import MAX_CHOICES
from services.engine.errors import InvalidRequestError, UnsupportedError
from services.engine.request import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS

_TEXT_ALONE = "this service takes text alone; Octavo's frontend takes images"
REFUSED_FIELDS = {
    "text": "the engine takes tokens: send tokenized",
    "kv_transfer_params": "prompts are computed where they are continued",
    "kv_transfer_params_json": "prompts are computed where they are continued",
    "mm_inputs": _TEXT_ALONE,
    "extra_mm_inputs": _TEXT_ALONE,
    "media_refs": _TEXT_ALONE,
    "structural_tag": "use json_schema, regex, grammar, json_object or choice",
    "truncate_prompt_tokens": "send the tokens that are wanted",
}
"""Refused fields and the reason for the caller."""

CALLERS_FIELDS = {
    "original_text": "the tokens beside it are what counts",
    "spaces_between_special_tokens": "the caller makes text of the tokens",
    "include_stop_str_in_output": "the tokens of a stop string are sent, the caller cuts the text",
    "grammar_from_first_token": "every grammar holds from the first token on",
}
"""Fields without effect here, and the reason."""

_PLAIN_FIELDS = (
    "min_p", "frequency_penalty", "presence_penalty", "stop_token_ids", "ignore_eos", "min_tokens",
)  # fmt: skip
"""Fields with the same meaning in both protocols, absent or not."""


def check_served(message: vllm_engine_pb2.GenerateRequest) -> None:
    """Refuses unsupported fields.

    Raises:
        UnsupportedError: a field is unknown or not supported.
    """
    for part in (message, message.sampling_params):
        _refuse_fields(part)
    check_known(message)
    if message.HasField("data_parallel_rank") and message.data_parallel_rank != 0:
        raise UnsupportedError(
            f"data_parallel_rank is {message.data_parallel_rank}; this engine is rank 0 alone"
        )


def check_sizes(message: vllm_engine_pb2.GenerateRequest, *, max_model_len: int) -> None:
    """Refuses long lists before they are copied for each output.

    Raises:
        InvalidRequestError: a list has too many entries.
    """
    given = message.sampling_params
    lists = (
        ("logit_bias", given.logit_bias, MAX_LOGIT_BIAS),
        ("stop_token_ids", given.stop_token_ids, MAX_STOP_TOKEN_IDS),
        ("choice", given.choice.choices, MAX_CHOICES),
    )
    check_lengths(len(message.tokenized.input_ids), lists, max_model_len=max_model_len)


def to_samples(message: vllm_engine_pb2.GenerateRequest) -> Iterator[GenerateRequest]:
    """Yields one request of the engine's own protocol per output.

    It is lazy: the first may be refused before the others are copied.

    Raises:
        InvalidRequestError, UnsupportedError: the message has no equivalent.
    """
    given = message.sampling_params
    num_samples = given.n or 1
    if num_samples > MAX_SAMPLES:
        raise InvalidRequestError(f"n is {num_samples}; it must be 1 to {MAX_SAMPLES}")
    sampling = _sampling(given)
    return samples_of(
        sampling,
        num_samples,
        request_id=message.request_id or uuid.uuid4().hex,
        prompt_token_ids=message.tokenized.input_ids,
    )


def stop_rule(given: vllm_engine_pb2.SamplingParams) -> StopRule | None:
    """Returns the stop strings of a request, or None.

    Raises:
        InvalidRequestError: there are too many, or one is empty or too long.
    """
    if not given.stop:
        return None
    return StopRule(tuple(given.stop), given.skip_special_tokens, given.min_tokens)


def _refuse_fields(message: Message) -> None:
    for field, _ in message.ListFields():
        if field.name in REFUSED_FIELDS:
            raise UnsupportedError(f"{field.name} is not served: {REFUSED_FIELDS[field.name]}")


def _sampling(given: vllm_engine_pb2.SamplingParams) -> SamplingParams:
    own = SamplingParams(
        temperature=given.temperature if given.HasField("temperature") else 1.0,
        top_p=given.top_p or 1.0,
        top_k=given.top_k,
        repetition_penalty=given.repetition_penalty or 1.0,
        logit_bias=_logit_bias(given),
        **{name: getattr(given, name) for name in _PLAIN_FIELDS},
    )
    if given.HasField("max_tokens"):
        own.max_tokens = given.max_tokens
    if given.HasField("seed"):
        own.seed = given.seed % SEEDS
    for name in ("logprobs", "prompt_logprobs"):
        if given.HasField(name):
            setattr(own, name, _not_negative(name, getattr(given, name)))
    if (structured_output := _structured_output(given)) is not None:
        own.structured_output.CopyFrom(structured_output)
    return own


def _logit_bias(given: vllm_engine_pb2.SamplingParams) -> dict[int, float]:
    return {
        _not_negative("a token id of logit_bias", token_id): bias
        for token_id, bias in given.logit_bias.items()
    }


def _not_negative(what: str, value: int) -> int:
    if value < 0:
        raise InvalidRequestError(f"{what} is {value}; it must be at least 0")
    return value


def _structured_output(given: vllm_engine_pb2.SamplingParams) -> StructuredOutput | None:
    match given.WhichOneof("constraint"):
        case None:
            return None
        case "grammar":
            return StructuredOutput(lark=given.grammar)
        case "choice":
            return StructuredOutput(choice=TextChoice(texts=given.choice.choices))
        case kind:
            return StructuredOutput(**{kind: getattr(given, kind)})
