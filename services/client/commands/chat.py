"""`octavo chat`: a conversation in the terminal."""

import asyncio
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from services.client.calls import ask_frontend
from services.client.channel import Access
from services.client.client import OctavoClient
from services.client.console import echo
from services.client.context import Context, read_image
from services.client.errors import OctavoError
from services.client.flags import DEFAULT_FRONTEND, FrontendAddress, TimeoutSeconds, structured
from services.client.requests import Message, Options, Reply, Tool, ToolCall
from services.client.responses import Completion
from services.client.stream import Stream
from services.client.structured_output import Structure
from services.client.terminal import Answer, AsJson, show, show_once
from services.processes.terminal_text import terminal_text

COMMANDS = (
    "/system TEXT sets the system message, /image FILE shows an image with the next message,"
    " /reset forgets the conversation, /quit leaves"
)


def chat(
    *,
    message: Annotated[
        str | None, typer.Argument(help="Ask this once and leave; a conversation if absent.")
    ] = None,
    options: Options,
    structure: Structure,
    context: Context,
    as_json: AsJson = False,
    timeout_s: TimeoutSeconds = None,
    frontend: FrontendAddress = DEFAULT_FRONTEND,
    access: Access,
) -> None:
    """Talks with the model, with history; Ctrl-C ends an answer, Ctrl-D or /quit the program.

    In the conversation, /system TEXT sets the system message, /image FILE shows an image with the
    next message, and /reset forgets what was said.
    After tool calls, it asks for the result of each. Reasoning goes to standard error.
    A flag that is absent means the model's own default. Lines that come through a pipe are asked
    one by one; if any gets no answer, the exit code is 1.

    Examples:
    - `octavo chat`

    - `octavo chat "What is 7 + 5?" --temperature 0`

    - `octavo chat --system "You are a kind storyteller." --max-tokens 200`

    - `octavo chat "What is the weather in Rome?" --tools tools.json --tool-choice required`

    - `octavo chat "What is on this picture?" --image photo.jpg`
    """
    try:
        tools, reply = context.read_tools(), context.read_reply()
        images = [read_image(path) for path in context.image]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if as_json and message is None:
        raise typer.BadParameter("--json needs a message")
    asking = Asking(structured(options, structure), tools, reply, timeout_s)
    conversation = Conversation(context.system)
    conversation.show(images)
    if message is None:
        Repl(conversation, asking).run(frontend, access)
    else:
        conversation.ask(message)
        ask_frontend(
            frontend,
            access,
            lambda each: show_once(asking.chat(each, conversation.messages), as_json=as_json),
        )


@dataclass(frozen=True, slots=True)
class Asking:
    """The options of every request of a conversation."""

    options: Options
    tools: Sequence[Tool]
    reply: Reply
    timeout_s: float | None

    def chat(self, client: OctavoClient, messages: Sequence[Message]) -> Stream:
        """Asks for the answer to a conversation."""
        return client.chat(
            messages,
            self.options,
            tools=self.tools,
            reply=self.reply,
            timeout_s=self.timeout_s,
        )


class Conversation:
    """The conversation so far."""

    def __init__(self, system: str = "") -> None:
        self.system = system
        self._turns: list[Message] = []
        self._shown: list[bytes] = []

    @property
    def messages(self) -> list[Message]:
        """The conversation as a request carries it."""
        opening = [Message(role="system", content=self.system)] if self.system else []
        return opening + self._turns

    def show(self, images: Iterable[bytes]) -> None:
        """Adds images to what the user says next."""
        self._shown.extend(images)

    def ask(self, text: str) -> None:
        """Adds what the user says."""
        self._turns.append(Message(role="user", content=text, images=tuple(self._shown)))
        self._shown.clear()

    def answer(self, completion: Completion) -> None:
        """Adds what the model said."""
        self._turns.append(
            Message(
                role="assistant", content=completion.text, tool_calls=tuple(completion.tool_calls)
            )
        )

    def add_result(self, call: ToolCall, result: str) -> None:
        """Adds the result of a tool call."""
        self._turns.append(Message(role="tool", content=result, tool_call_id=call.id))

    def take_back(self) -> None:
        """Forgets what came after the last complete answer."""
        while self._turns and self._turns[-1].role == "tool":
            self._turns.pop()
        self._turns.pop()

    def reset(self) -> None:
        """Forgets everything but the system message."""
        self._turns.clear()
        self._shown.clear()


class Repl:
    """Reads a line, shows the answer, and so on."""

    def __init__(self, conversation: Conversation, asking: Asking) -> None:
        self._conversation = conversation
        self._asking = asking
        self._is_terminal = sys.stdin.isatty()
        self._has_failed = False

    def run(self, address: str, access: Access) -> None:
        """Talks until /quit or the end of the input.

        Raises:
            typer.Exit: a request failed, and the input is no terminal.
        """
        is_terminal = self._is_terminal
        if is_terminal:
            import readline  # noqa: F401  gives input() line editing, on a terminal only

            echo(COMMANDS, err=True)
        # One loop for all answers: the channel belongs to it. Its run() turns Ctrl-C into the
        # cancellation of the answer.
        with asyncio.Runner() as runner:
            client = runner.run(_connect(address, access))
            try:
                while (line := _read_line("> " if is_terminal else "")) is not None:
                    if line == "/quit":
                        break
                    self._handle(line, runner, client)
            finally:
                runner.run(client.close())
        if self._has_failed and not is_terminal:
            raise typer.Exit(1)

    def _handle(self, line: str, runner: asyncio.Runner, client: OctavoClient) -> None:
        command, _, rest = line.partition(" ")
        if command == "/system":
            self._conversation.system = rest.strip()
        elif command == "/reset":
            self._conversation.reset()
        elif command == "/image":
            self._show(Path(rest.strip()))
        elif command.startswith("/"):
            echo(COMMANDS, err=True)
        elif line:
            self._conversation.ask(line)
            while self._ask(runner, client):
                pass

    def _show(self, path: Path) -> None:
        """Shows an image with the next message, or says why not."""
        try:
            self._conversation.show([read_image(path)])
        except ValueError as error:
            self._has_failed = True
            echo(f"octavo: {error}", fg=typer.colors.RED, err=True)

    def _ask(self, runner: asyncio.Runner, client: OctavoClient) -> bool:
        """Shows the next answer; returns whether results of its tool calls want another one."""
        conversation = self._conversation
        try:
            answer = runner.run(self._answer(client))
        except KeyboardInterrupt:
            conversation.take_back()
            echo("\n(cancelled)", err=True)
            return False
        except OctavoError as error:
            self._has_failed = True
            conversation.take_back()
            echo(f"octavo: {error}", fg=typer.colors.RED, err=True)
            return False
        conversation.answer(answer.completion)
        echo(answer.summary(), dim=True, err=True)
        calls = answer.completion.tool_calls
        for call in calls:
            result = _read_line(
                f"result of {terminal_text(call.name)}> " if self._is_terminal else ""
            )
            if result is None:
                return False
            conversation.add_result(call, result)
        return bool(calls)

    async def _answer(self, client: OctavoClient) -> Answer:
        async with self._asking.chat(client, self._conversation.messages) as stream:
            return await show(stream)


async def _connect(address: str, access: Access) -> OctavoClient:
    return OctavoClient(address, access=access)


def _read_line(prompt: str) -> str | None:
    """Returns the next line, or None at the end of the input; Ctrl-C gives an empty one."""
    try:
        return input(prompt).strip()
    except EOFError:
        return None
    except KeyboardInterrupt:
        echo(err=True)
        return ""
