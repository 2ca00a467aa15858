"""Checks a caller's variables for the chat template."""

from collections.abc import Mapping
from typing import Any

from services.frontend.errors import InvalidRequestError

FIELD = "chat_template_kwargs"
MAX_VARIABLES = 32
MAX_NAME_CHARACTERS = 64
MAX_LIST_ITEMS = 64
RESERVED = frozenset({"add_generation_prompt", "documents", "messages", "tools"})
"""Variables that the frontend itself sets, beside special tokens."""


def check_template_variables(variables: Mapping[str, Any]) -> None:
    """Raises InvalidRequestError for too many variables, a reserved name or a wrong value."""
    if len(variables) > MAX_VARIABLES:
        raise _refusal(f"has {len(variables)} entries; the limit is {MAX_VARIABLES}")
    for name, value in variables.items():
        shown = name[:MAX_NAME_CHARACTERS]
        if not name.isidentifier() or len(name) > MAX_NAME_CHARACTERS:
            raise _refusal(f"has the name {shown!r}, which no variable can have")
        if name in RESERVED or name.endswith("_token"):
            raise _refusal(f"sets {shown!r}, which the server sets")
        values = value if isinstance(value, list) else [value]
        if len(values) > MAX_LIST_ITEMS:
            raise _refusal(f"has {len(values)} values for {shown!r}; the limit is {MAX_LIST_ITEMS}")
        if not all(each is None or isinstance(each, str | int | float) for each in values):
            raise _refusal(
                f"has {shown!r}, which is neither a text, number, boolean nor list of them"
            )


def _refusal(text: str) -> InvalidRequestError:
    return InvalidRequestError(f"{FIELD} {text}", field=FIELD)
