"""Reads the structured output of a request."""

import json

from protos.common.v1 import sampling_pb2
from services.engine.errors import InvalidRequestError
from services.engine.structured_output import GrammarKind, StructuredOutput

MAX_CHOICES = 1024
MAX_TAGS = 128


def structured_output_of(
    message: sampling_pb2.StructuredOutput, max_bytes: int
) -> StructuredOutput:
    """Reads and limits it; compilation validates the grammar.

    Raises:
        InvalidRequestError: it is empty, too large, or has an empty text.
    """
    kind = message.WhichOneof("grammar")
    has_budget = message.preamble.HasField("max_tokens")
    if kind is None and not has_budget:
        raise _refusal("structured_output is empty; it must say what the output is")
    texts: tuple[str, ...] = ()
    match kind:
        case None:
            pass
        case "json_object":
            if not message.json_object:
                raise _refusal("structured_output.json_object is false; leave it out")
        case "choice":
            num_texts = len(message.choice.texts)
            if not 1 <= num_texts <= MAX_CHOICES:
                raise _refusal(
                    f"structured_output.choice has {num_texts} texts; it must have 1 to "
                    f"{MAX_CHOICES}"
                )
            texts = tuple(message.choice.texts)
        case "tagged":
            texts = (_tagged(message.tagged),)
        case _:
            texts = (getattr(message, kind),)
    if not all(texts):
        raise _refusal(f"structured_output.{kind} has an empty text")
    preamble = _preamble(message)
    own_texts = (*texts, *(preamble or ()), message.begun)
    num_bytes = sum(len(text.encode()) for text in own_texts)
    if num_bytes > max_bytes:
        raise _refusal(f"structured_output.{kind} has {num_bytes} bytes; the limit is {max_bytes}")
    return StructuredOutput(
        None if kind is None else GrammarKind(kind),
        texts,
        preamble,
        max_preamble_tokens=message.preamble.max_tokens if has_budget else None,
        begun=message.begun,
    )


def _preamble(message: sampling_pb2.StructuredOutput) -> tuple[str, str] | None:
    if not message.HasField("preamble"):
        return None
    if not message.preamble.end:
        raise _refusal("structured_output.preamble.end is empty")
    if message.begun:
        raise _refusal("structured_output.begun cannot go with a preamble before it")
    return message.preamble.begin, message.preamble.end


def _tagged(message: sampling_pb2.TaggedText) -> str:
    """Returns the fields of a tagged text as JSON."""
    if not 1 <= len(message.tags) <= MAX_TAGS:
        raise _refusal(
            f"structured_output.tagged has {len(message.tags)} tags; it must have 1 to {MAX_TAGS}"
        )
    if len(message.triggers) > MAX_TAGS or not all(message.triggers):
        raise _refusal(f"structured_output.tagged has an empty trigger, or more than {MAX_TAGS}")
    if message.has_text_between and (
        not message.triggers or message.begin or message.separator or message.end
    ):
        raise _refusal(
            "structured_output.tagged has text between its parts; it then takes triggers, and no"
            " begin, separator or end"
        )
    fields = {
        "begin": message.begin,
        "separator": message.separator,
        "end": message.end,
        "triggers": list(message.triggers),
        "stop_after_first": message.stop_after_first,
        "has_text_between": message.has_text_between,
        "tags": [
            (tag.begin, tag.json_schema, tag.end, _pairs(tag) if tag.HasField("pairs") else None)
            for tag in message.tags
        ],
    }
    return json.dumps(fields, ensure_ascii=False)


def _pairs(tag: sampling_pb2.Tag) -> dict[str, str | bool]:
    pairs = tag.pairs
    if not pairs.assign or (pairs.bare_strings and not pairs.end):
        raise _refusal("structured_output.tagged has pairs without assign or end")
    return {field.name: getattr(pairs, field.name) for field in pairs.DESCRIPTOR.fields}


def _refusal(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, field="structured_output")
