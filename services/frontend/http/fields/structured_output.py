"""Converts the form of the output from OpenAI's and vLLM's fields."""

import json
from typing import Any

from services.frontend.engine_client.messages import StructuredOutput, Tag, TaggedText, TextChoice
from services.frontend.errors import InvalidRequestError
from services.frontend.http.fields.generation import ResponseFormat, StructuredOutputs


def structured_output_of(
    wanted: StructuredOutputs | None, response_format: ResponseFormat | None
) -> StructuredOutput | None:
    """Returns the form for the engine; None allows any output.

    Raises:
        InvalidRequestError: there is more than one form, or an empty one.
    """
    by_format = None if response_format is None else _of_format(response_format)
    if wanted is None:
        return by_format
    if by_format is not None:
        raise InvalidRequestError(
            "response_format and structured_outputs exclude each other", field="structured_outputs"
        )
    given = [name for name in type(wanted).model_fields if getattr(wanted, name) is not None]
    if len(given) != 1:
        raise InvalidRequestError(
            f"structured_outputs has {len(given)} forms of output; it must have 1",
            field="structured_outputs",
        )
    if wanted.json_schema is not None:
        return StructuredOutput(json_schema=_schema_text(wanted.json_schema))
    if wanted.choice is not None:
        return StructuredOutput(choice=TextChoice(texts=wanted.choice))
    return StructuredOutput(json_object=wanted.json_object, regex=wanted.regex, lark=wanted.grammar)


def _of_format(wanted: ResponseFormat) -> StructuredOutput | None:
    if wanted.json_schema is not None:
        return StructuredOutput(json_schema=_schema_text(wanted.json_schema.schema_))
    if wanted.structures is not None:
        tags = [
            Tag(begin=each.begin, json_schema=_schema_text(each.schema_), end=each.end)
            for each in wanted.structures
        ]
        tagged = TaggedText(tags=tags, triggers=wanted.triggers, has_text_between=True)
        return StructuredOutput(tagged=tagged)
    return StructuredOutput(json_object=True) if wanted.type == "json_object" else None


def _schema_text(schema: str | dict[str, Any]) -> str:
    return schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
