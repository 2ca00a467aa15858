"""Converts OpenEngine requests to the engine's own, and refuses unsupported fields.

Absent sampling fields mean the model's defaults, as in the engine's own protocol.
"""

from collections.abc import Iterator

from google.protobuf.message import Message

from protos.common.v1.sampling_pb2 import SamplingParams, StructuredOutput, TextChoice
from protos.engine.v1.engine_pb2 import GenerateRequest
from protos.openengine.v1 import openengine_pb2
from services.engine.edge.call import MAX_SAMPLES, check_lengths, samples_of
from services.engine.edge.request_reader import check_known
from services.engine.edge.stop_strings import MAX_STOP_STRINGS, StopRule
from services.engine.edge.structured_output import MAX_CHOICES
from services.engine.errors import InvalidRequestError, UnsupportedError
from services.engine.request import MAX_STOP_TOKEN_IDS

PRIORITY = "openengine-priority"
TARGET_RANK = "openengine-target-dp-rank"

REFUSED_FIELDS = {
    "prompt": "the engine takes tokens: send token_ids",
    "media": "models take text alone in this protocol",
    "session": "prompts are computed where they are continued",
    "bypass_prefix_cache": "use a cache_salt of its own",
    "structural_tag": "use json_schema, regex, ebnf_grammar, json_object or choice",
    "backend": "there is one",
    "prompt_logprob_start": "all of the prompt is reported",
    "kv_session": "prompts are computed where they are continued",
    "all_requests": "each request is named by its caller",
}
"""Refused fields and the reason for the caller; a field that is present and 0 is none."""

CALLERS_FIELDS = {"extra": "keys of other engines, which this protocol lets an engine ignore"}
"""Fields without effect here, and the reason."""

_PLAIN_FIELDS = (
    "temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "seed",
)  # fmt: skip
"""Fields of sampling with the same meaning in both protocols."""


def check_served(message: Message) -> None:
    """Refuses unsupported fields at any depth.

    Raises:
        UnsupportedError: a field is unknown or not supported.
    """
    _refuse_fields(message)
    check_known(message)


def check_sizes(message: openengine_pb2.GenerateRequest, *, max_model_len: int) -> None:
    """Refuses long lists before they are copied for each output.

    Raises:
        InvalidRequestError: a list has too many entries.
    """
    lists = (
        ("conditions", message.stopping.conditions, MAX_STOP_TOKEN_IDS + MAX_STOP_STRINGS),
        ("choices", message.guided.choice.choices, MAX_CHOICES),
    )
    check_lengths(len(message.token_ids.ids), lists, max_model_len=max_model_len)


def to_samples(
    message: openengine_pb2.GenerateRequest, *, request_id: str, priority: int
) -> Iterator[GenerateRequest]:
    """Yields one request of the engine's own protocol per output; see `samples_of`.

    Raises:
        InvalidRequestError, UnsupportedError: the message has no equivalent.
    """
    given = message.sampling
    num_samples = given.num_sequences if given.HasField("num_sequences") else 1
    if not 0 < num_samples <= MAX_SAMPLES:
        raise InvalidRequestError(f"num_sequences is {num_samples}; it must be 1 to {MAX_SAMPLES}")
    return samples_of(
        _sampling(message),
        num_samples,
        request_id=request_id,
        prompt_token_ids=message.token_ids.ids,
        priority=priority,
        cache_salt=message.kv.cache_salt,
        model=message.lora_name,
    )


def stop_rule(stopping: openengine_pb2.StoppingOptions) -> StopRule | None:
    """Returns the stop strings of a request, or None.

    Raises:
        InvalidRequestError: there are too many, or one is empty or too long.
    """
    texts = tuple(each.stop_text for each in stopping.conditions if each.HasField("stop_text"))
    return StopRule(texts, True, stopping.min_tokens) if texts else None


def stop_token_ids(stopping: openengine_pb2.StoppingOptions) -> list[int]:
    """Returns the tokens that the caller wants to end an output."""
    return [each.stop_token_id for each in stopping.conditions if each.HasField("stop_token_id")]


def _refuse_fields(message: Message) -> None:
    for field, value in message.ListFields():
        if field.name in REFUSED_FIELDS and value:
            raise UnsupportedError(f"{field.name} is not served: {REFUSED_FIELDS[field.name]}")
        if isinstance(value, Message) and field.name not in CALLERS_FIELDS:
            _refuse_fields(value)


def _sampling(message: openengine_pb2.GenerateRequest) -> SamplingParams:
    given, stopping, response = message.sampling, message.stopping, message.response
    if stopping.HasField("include_stop_in_output") and not stopping.include_stop_in_output:
        raise UnsupportedError(
            "include_stop_in_output is false; the tokens of a stop are sent, and the caller cuts"
        )
    own = SamplingParams(
        stop_token_ids=stop_token_ids(stopping),
        **{name: getattr(given, name) for name in _PLAIN_FIELDS if given.HasField(name)},
    )
    for name in ("max_tokens", "min_tokens", "ignore_eos"):
        if stopping.HasField(name):
            setattr(own, name, getattr(stopping, name))
    if given.HasField("top_k"):
        if given.top_k < 0:
            raise InvalidRequestError(f"top_k is {given.top_k}; it must be at least 0")
        own.top_k = given.top_k
    if response.return_output_logprobs:
        own.logprobs = _num_candidates(response.output_candidates)
    if response.return_prompt_logprobs:
        own.prompt_logprobs = _num_candidates(response.prompt_candidates)
    if (structured_output := _structured_output(message.guided)) is not None:
        own.structured_output.CopyFrom(structured_output)
    return own


def _num_candidates(selection: openengine_pb2.CandidateTokenSelection) -> int:
    if selection.WhichOneof("selection") not in (None, "top_n"):
        raise UnsupportedError("candidates are the most likely tokens: use top_n")
    num_candidates: int = selection.top_n
    return num_candidates


def _structured_output(guided: openengine_pb2.GuidedDecoding) -> StructuredOutput | None:
    match guided.WhichOneof("guide"):
        case None:
            return None
        case "ebnf_grammar":
            return StructuredOutput(lark=guided.ebnf_grammar)
        case "choice":
            return StructuredOutput(choice=TextChoice(texts=guided.choice.choices))
        case "json_object":
            return StructuredOutput(json_object=True)
        case kind:
            return StructuredOutput(**{kind: getattr(guided, kind)})
