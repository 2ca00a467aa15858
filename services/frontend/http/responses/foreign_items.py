"""Items of tools that are not served, in conversations that were begun elsewhere.

A call whose result is a text is shown to the model as a function's call and its result. The others
say nothing that it could read, and are left out.
"""

import json
from typing import Any

from services.frontend.http.responses.item_schema import ForeignItem
from services.frontend.pipeline.tools import tool_call_of
from services.frontend.text.chat_template import Message

_CALLS = {
    "apply_patch_call": ("apply_patch", "operation", None),
    "code_interpreter_call": ("code_interpreter", "code", "outputs"),
    "file_search_call": ("file_search", "queries", "results"),
    "local_shell_call": ("local_shell", "action", None),
    "mcp_call": ("", "arguments", "output"),
    "shell_call": ("shell", "action", None),
}
"""The function that a call is shown as, its field with the arguments, and that with the result."""
_OUTPUTS = frozenset({"apply_patch_call_output", "local_shell_call_output", "shell_call_output"})


def foreign_call(item: ForeignItem) -> Message | None:
    """Returns the call of an item; None if it has none that a model could read."""
    if item.type not in _CALLS:
        return None
    name, field, result = _CALLS[item.type]
    fields = item.model_extra or {}
    if result is not None and fields.get(result) is None:
        return None  # a result is not in the item, and none follows
    name = name or str(fields.get("name") or "mcp")
    value = fields.get(field)
    if isinstance(value, str) and (read := _object_in(value)) is not None:
        value = read
    arguments = value if isinstance(value, dict) else {field: value}
    return tool_call_of(_id_of(item), name, json.dumps(arguments, ensure_ascii=False))


def foreign_result(item: ForeignItem) -> Message | None:
    """Returns the result in an item as a message; None if it has none."""
    fields = item.model_extra or {}
    if item.type in _OUTPUTS:
        value = fields.get("output") or fields.get("status")
    elif item.type in _CALLS and (field := _CALLS[item.type][2]) is not None:
        value = fields.get(field)
    else:
        return None
    if value is None:
        return None
    content = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return {"role": "tool", "tool_call_id": _id_of(item), "content": content}


def _id_of(item: ForeignItem) -> str:
    """Returns the id that a call and its result share; a local shell's result has it as its own."""
    return item.call_id or item.id or ""


def _object_in(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
