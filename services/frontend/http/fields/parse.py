"""Parses bodies; an invalid one is refused with the path of its first wrong field."""

import re
from collections.abc import Collection, Sequence
from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from services.frontend.errors import InvalidRequestError
from services.frontend.http.fields.body import UNKNOWN_FIELD, Body
from services.frontend.text.surrogates import without_escaped_halves
from services.settings.flags import reason_of

NOT_SUPPORTED = " is not supported"
"""Follows the path of an unknown field in an error, if its API has no words of its own."""
_SUCCESSORS = {
    "guided_json": ("structured_outputs", "json, or response_format with json_schema"),
    "guided_json_object": ("structured_outputs", "json_object, or response_format with the same"),
    "guided_regex": ("structured_outputs", "regex"),
    "guided_choice": ("structured_outputs", "choice"),
    "guided_grammar": ("structured_outputs", "grammar"),
    "regex": ("structured_outputs", "regex"),
    "ebnf": ("structured_outputs", "grammar"),
    "enable_thinking": ("chat_template_kwargs", "enable_thinking"),
    "functions": ("tools", ""),
    "function_call": ("tool_choice", ""),
    "reasoning": ("reasoning_effort", ""),
    "max_new_tokens": ("max_tokens", ""),
    "no_stop_trim": ("include_stop_str_in_output", ""),
}
"""Fields of other servers, with the field that means the same here and its entry."""
_CODES = {UNKNOWN_FIELD: "unknown_parameter", "literal_error": "invalid_value"}
"""OpenAI's names of mistakes, by which its clients know to send a request in another way."""
_FORM = re.compile(r"^(constrained-)?(str|int|float|bool)$|\[.*\]$", re.DOTALL)
"""Names that pydantic gives to the forms of a value."""

_Body = TypeVar("_Body", bound=Body)


def parse_body(
    body_class: type[_Body],
    body: bytes,
    *,
    is_strict: bool = False,
    tags: Collection[str] = (),
    unknown: str = NOT_SUPPORTED,
) -> _Body:
    """Parses a body by its fields alone; for `tags` and `unknown` see `refusal_of`.

    With `is_strict` fields that nothing here can follow are refused.

    Halves of surrogate pairs, which texts cut by JavaScript have, become U+FFFD.

    Raises:
        InvalidRequestError: it is not JSON, or a field is missing, wrong or not supported.
    """
    try:
        return body_class.model_validate_json(body, context=is_strict)
    except ValidationError as error:
        if error.errors(include_url=False)[0]["type"] == "json_invalid":
            whole = without_escaped_halves(body)
            if whole != body:
                return parse_body(
                    body_class, whole, is_strict=is_strict, tags=tags, unknown=unknown
                )
        raise refusal_of(error, tags=tags, known=body_class.model_fields, unknown=unknown) from None


def refusal_of(
    error: ValidationError,
    *,
    tags: Collection[str] = (),
    known: Collection[str] = (),
    unknown: str = NOT_SUPPORTED,
) -> InvalidRequestError:
    """Returns the refusal of an invalid body, with the path of the first wrong field.

    `tags` names the alternatives of tagged unions; they are no part of the path. `known` has the
    body's own fields: an unknown one that has a successor among them is refused with its name.
    `unknown` follows the path of an unknown field.
    """
    first = _told_error(error.errors(include_url=False))
    location = _without_tags(first["loc"], tags)
    given = first["input"]
    if first["type"] == UNKNOWN_FIELD:
        name = first["ctx"]["name"]
        problem = unknown + ("" if location else _successor(name, known))
        location = (*location, name)
    elif first["type"] == "union_tag_invalid":
        tag, known = first["ctx"]["tag"], first["ctx"]["expected_tags"]
        problem = f": {_shown(tag)!r} is not supported here; {known} are"
    elif first["type"] == "literal_error" and isinstance(given, str):
        problem = f": {_shown(given)!r} is not supported here; use {first['ctx']['expected']}"
    else:
        problem = f": {reason_of(first)}"
    if not location:
        return InvalidRequestError(f"the body cannot be read{problem}")
    path = ".".join(_shown(str(part)) for part in location)
    is_unknown = first["type"] == UNKNOWN_FIELD and len(location) == 1
    return InvalidRequestError(
        path + problem,
        field=_shown(str(location[0])),
        is_field_ours=not is_unknown,
        code=_CODES.get(first["type"]),
    )


def _successor(name: str, known: Collection[str]) -> str:
    """Returns the advice to send another field instead; empty if there is none."""
    field, entry = _SUCCESSORS.get(name, ("", ""))
    if field not in known:
        return ""
    return f"; send {field}" + (f" with {entry}" if entry else "") + " instead"


def _told_error(errors: Sequence[ErrorDetails]) -> ErrorDetails:
    """Returns the first error; of a value with several forms, that in the intended form."""
    for each in errors:
        if each["type"] == UNKNOWN_FIELD:
            return each
    first = errors[0]
    depth = next((i for i, part in enumerate(first["loc"]) if _is_form(part)), None)
    if depth is None:
        return first
    rivals = [each for each in errors if each["loc"][:depth] == first["loc"][:depth]]
    # More of the value has the form in which the error is deepest, or is not about its type.
    return max(rivals, key=lambda each: (len(each["loc"]), not each["type"].endswith("_type")))


def _is_form(part: int | str) -> bool:
    """Whether a part of a path is pydantic's name for one form of a value."""
    return isinstance(part, str) and _FORM.search(part) is not None


def _without_tags(location: tuple[int | str, ...], tags: Collection[str]) -> tuple[int | str, ...]:
    """Drops names of forms, and tags: these follow an index, or a top-level field."""
    return tuple(
        part
        for index, part in enumerate(location)
        if not _is_form(part)
        and (part not in tags or (index != 1 and not isinstance(location[index - 1], int)))
    )


def _shown(name: str) -> str:
    """Shortens a name from the client."""
    return name if len(name) <= 64 else f"{name[:64]}..."
