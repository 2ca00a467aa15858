"""The context of a chat, as flags."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from services.client.requests import Reply, Tool


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Everything that the chat template gets beside the user's messages."""

    system: Annotated[str, "System message."] = ""
    image: Annotated[Sequence[Path], "Image that the first message shows; repeatable."] = ()
    tools: Annotated[Path | None, "File of tools, a JSON list in OpenAI's form."] = None
    template_variables: Annotated[
        str, "Variables of the chat template, such as enable_thinking, as a JSON object."
    ] = "{}"
    reply: Reply = field(default_factory=Reply)

    def read_tools(self) -> Sequence[Tool]:
        """Reads the tools.

        Raises:
            ValueError: their file cannot be read, or is no list of tools.
        """
        return () if self.tools is None else read_tools(self.tools)

    def read_reply(self) -> Reply:
        """Returns the rules for the reply, with the template's variables.

        Raises:
            ValueError: the variables are not a JSON object.
        """
        return replace(self.reply, template_variables=_read_variables(self.template_variables))


def read_image(path: Path) -> bytes:
    """Reads a file of an image, which the server checks.

    Raises:
        ValueError: it cannot be read, or is empty.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    if not data:
        raise ValueError(f"{path} is empty")
    return data


def read_tools(path: Path) -> list[Tool]:
    """Reads a file of tools: a JSON list in OpenAI's form.

    Raises:
        ValueError: it cannot be read, or is something else.
    """
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(given, list):
        raise ValueError(f"{path} is not a list of tools")  # noqa: TRY004  a mistake in a file
    return [_tool(each, f"entry {index} of {path}") for index, each in enumerate(given)]


def _read_variables(text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise ValueError("--template-variables is not a JSON object")  # noqa: TRY004  of a caller
    return given


def _tool(given: Any, what: str) -> Tool:
    function = given.get("function") if isinstance(given, dict) else None
    function = function if isinstance(function, dict) else {}
    name = function.get("name")
    if not name or not isinstance(name, str):
        raise ValueError(f'{what} is not {{"type": "function", "function": {{"name": ...}}}}')
    unknown = function.keys() - {"name", "description", "parameters", "strict"}
    if unknown:
        raise ValueError(f"{what} has {min(unknown)!r}, which no tool has")
    parameters = function.get("parameters")
    return Tool(
        name=name,
        description=function.get("description") or "",
        parameters=None if parameters is None else json.dumps(parameters, ensure_ascii=False),
        strict=function.get("strict"),
    )
