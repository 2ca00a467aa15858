"""`octavo chat`: a conversation in the terminal."""

import asyncio
import sys
from typing import Annotated

import typer

from services.client.channel import Access
from services.client.client import OctavoClient
from services.client.errors import OctavoError
from services.client.flags import DEFAULT_FRONTEND, FrontendAddress, TimeoutSeconds, structured
from services.client.requests import Message, Options
from services.client.structured_output import Structure
from services.client.terminal import Answer, AsJson, show, show_json

COMMANDS = "/system TEXT sets the system message, /reset forgets the conversation, /quit leaves"


def chat(
    *,
    message: Annotated[
        str | None, typer.Argument(help="Ask this once and leave; a conversation if absent.")
    ] = None,
    system: Annotated[str, typer.Option(help="System message.")] = "",
    options: Options,
    structure: Structure,
    as_json: AsJson = False,
    timeout_s: TimeoutSeconds = None,
    frontend: FrontendAddress = DEFAULT_FRONTEND,
    access: Access,
) -> None:
    """Talks with the model, with history; Ctrl-C ends an answer, Ctrl-D or /quit the program.

    In the conversation, /system TEXT sets the system message and /reset forgets what was said.
    A flag that is absent means the model's own default. Lines that come through a pipe are asked
    one by one; if any gets no answer, the exit code is 1.

    Examples:
    - `octavo chat`

    - `octavo chat "What is 7 + 5?" --temperature 0`

    - `octavo chat --system "You are a kind storyteller." --max-tokens 200`
    """
    options = structured(options, structure)
    conversation = Conversation(system)
    if message is None:
        repl = Repl(conversation, options, timeout_s)
        repl.run(frontend, access)
        if repl.has_failed and not sys.stdin.isatty():
            raise typer.Exit(1)
    else:
        conversation.ask(message)
        asyncio.run(_ask_once(conversation, options, timeout_s, frontend, access, as_json))


class Conversation:
    """The conversation so far."""

    def __init__(self, system: str = "") -> None:
        self.system = system
        self._turns: list[Message] = []

    @property
    def messages(self) -> list[Message]:
        """The conversation as a request carries it."""
        opening = [Message(role="system", content=self.system)] if self.system else []
        return opening + self._turns

    def ask(self, text: str) -> None:
        """Adds what the user says."""
        self._turns.append(Message(role="user", content=text))

    def answer(self, text: str) -> None:
        """Adds what the model said."""
        self._turns.append(Message(role="assistant", content=text))

    def take_back(self) -> None:
        """Forgets the last message, which got no answer."""
        self._turns.pop()

    def reset(self) -> None:
        """Forgets everything but the system message."""
        self._turns.clear()


class Repl:
    """Reads a line, shows the answer, and so on."""

    def __init__(
        self, conversation: Conversation, options: Options, timeout_s: float | None
    ) -> None:
        self._conversation = conversation
        self._options = options
        self._timeout_s = timeout_s
        self.has_failed = False
        """Whether a message got no answer."""

    def run(self, address: str, access: Access) -> None:
        """Talks until /quit or the end of the input."""
        is_terminal = sys.stdin.isatty()
        if is_terminal:
            import readline  # noqa: F401  gives input() line editing, on a terminal only

            typer.echo(COMMANDS, err=True)
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

    def _handle(self, line: str, runner: asyncio.Runner, client: OctavoClient) -> None:
        command, _, rest = line.partition(" ")
        if command == "/system":
            self._conversation.system = rest.strip()
        elif command == "/reset":
            self._conversation.reset()
        elif command.startswith("/"):
            typer.echo(COMMANDS, err=True)
        elif line:
            self._conversation.ask(line)
            try:
                answer = runner.run(self._answer(client))
            except KeyboardInterrupt:
                self._conversation.take_back()
                typer.echo("\n(cancelled)", err=True)
            except OctavoError as error:
                self.has_failed = True
                self._conversation.take_back()
                typer.secho(f"octavo: {error}", fg=typer.colors.RED, err=True)
            else:
                self._conversation.answer(answer.completion.text)
                typer.secho(answer.summary(), dim=True, err=True)

    async def _answer(self, client: OctavoClient) -> Answer:
        messages = self._conversation.messages
        async with client.chat(messages, self._options, timeout_s=self._timeout_s) as stream:
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
        typer.echo(err=True)
        return ""


async def _ask_once(
    conversation: Conversation,
    options: Options,
    timeout_s: float | None,
    address: str,
    access: Access,
    as_json: bool,
) -> None:
    async with OctavoClient(address, access=access) as client:
        stream = client.chat(conversation.messages, options, timeout_s=timeout_s)
        if as_json:
            await show_json(stream)
            return
        answer = await show(stream)
        typer.echo(answer.summary(), err=True)
