"""Tools that the vendor names and the client runs, as functions for other models.

Source: the descriptions of the bash, text editor and memory tools in Anthropic's documentation.
"""

import re
from collections.abc import Mapping
from typing import Any

_TEXT = {"type": "string"}
_LINES = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
_FILE_FIELDS: Mapping[str, Any] = {
    "path": {**_TEXT, "description": "The file or folder"},
    "file_text": {**_TEXT, "description": "For create: the whole content"},
    "old_str": {**_TEXT, "description": "For str_replace: the text to replace, which occurs once"},
    "new_str": {**_TEXT, "description": "For str_replace: the new text"},
    "insert_line": {
        "type": "integer",
        "description": "For insert: the line after which the text goes; 0 is the beginning",
    },
    "insert_text": {**_TEXT, "description": "For insert: the new text"},
    "view_range": {**_LINES, "description": "For view: the first and last line; -1 is the end"},
}


def _files(*commands: str, required: tuple[str, ...], **fields: Any) -> dict[str, Any]:
    command = {**_TEXT, "enum": list(commands)}
    return {
        "type": "object",
        "properties": {"command": command, **_FILE_FIELDS, **fields},
        "required": ["command", *required],
    }


_FUNCTIONS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "bash": (
        "Runs a command in a bash session that stays open between calls",
        {
            "type": "object",
            "properties": {
                "command": {**_TEXT, "description": "The command"},
                "restart": {"type": "boolean", "description": "Starts a new session instead"},
            },
        },
    ),
    "text_editor": (
        "Views, creates and edits text files",
        _files("view", "create", "str_replace", "insert", required=("path",)),
    ),
    "memory": (
        "Views, creates, edits, renames and deletes files under /memories, which last from one"
        " conversation to the next",
        _files(
            *("view", "create", "str_replace", "insert", "delete", "rename"),
            required=(),
            old_path={**_TEXT, "description": "For rename: the path now"},
            new_path={**_TEXT, "description": "For rename: the new path"},
        ),
    ),
}
_VERSIONED = re.compile(r"(\w+)_\d{8}")


def function_of(tool_type: str) -> tuple[str, dict[str, Any]] | None:
    """Returns the description and the schema of a tool's input; None if clients run no such tool.

    `tool_type` ends with the date of its version, such as bash_20250124.
    """
    versioned = _VERSIONED.fullmatch(tool_type)
    return None if versioned is None else _FUNCTIONS.get(versioned[1])
