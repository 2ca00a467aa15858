"""`octavo embed` and `octavo rerank`: vectors of texts, and documents ranked for a query."""

import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from services.client.channel import Access
from services.client.client import OctavoClient
from services.client.console import echo
from services.client.flags import DEFAULT_FRONTEND, FrontendAddress, TimeoutSeconds
from services.client.vectors import VectorOptions

BATCH = 256
"""Texts of one request; a file may have any number of lines."""


def embed(
    *,
    texts: Annotated[
        list[str] | None, typer.Argument(help="The texts; lines of standard input if absent.")
    ] = None,
    options: VectorOptions,
    dimensions: Annotated[
        int | None, typer.Option(min=1, help="Leading elements of each vector; absent: all.")
    ] = None,
    prompt_name: Annotated[
        str | None, typer.Option(help="The model's prompt to put before texts.")
    ] = None,
    timeout_s: TimeoutSeconds = None,
    frontend: FrontendAddress = DEFAULT_FRONTEND,
    access: Access,
) -> None:
    """Prints the vector of each text as a line of JSON; needs an engine with --task embed.

    Examples:
    - `octavo embed "a red bird" "a house" --dimensions 256`

    - `octavo embed --prompt-name query < questions.txt > vectors.jsonl`
    """

    async def run() -> int:
        num_tokens = 0
        async with OctavoClient(frontend, access=access) as client:
            for index, batch in _batches(_given(texts)):
                found = await client.embed(
                    batch,
                    options,
                    dimensions=dimensions,
                    prompt_name=prompt_name,
                    timeout_s=timeout_s,
                )
                for number, vector in enumerate(found.vectors, index):
                    echo(json.dumps({"index": number, "embedding": vector}))
                num_tokens += found.usage.prompt_tokens
        return num_tokens

    echo(f"{asyncio.run(run())} tokens", err=True)


def rerank(
    *,
    query: Annotated[str, typer.Argument(help="The query.")],
    documents: Annotated[
        list[str] | None, typer.Argument(help="The documents; lines of standard input if absent.")
    ] = None,
    options: VectorOptions,
    top_n: Annotated[
        int | None, typer.Option(min=1, help="Documents to print; absent: all.")
    ] = None,
    instruction: Annotated[
        str | None, typer.Option(help="The criterion; absent: the model's own.")
    ] = None,
    timeout_s: TimeoutSeconds = None,
    frontend: FrontendAddress = DEFAULT_FRONTEND,
    access: Access,
) -> None:
    """Prints documents as lines of JSON, best first; needs an engine with --task score.

    Examples:
    - `octavo rerank "Which bird is red?" "a red bird" "a house"`

    - `octavo rerank "Which bird is red?" --top-n 3 < documents.txt`
    """
    texts = _given(documents)

    async def run() -> tuple[list[float], int]:
        scores: list[float] = []
        num_tokens = 0
        async with OctavoClient(frontend, access=access) as client:
            for _, batch in _batches(texts):
                found = await client.score(
                    query, batch, options, instruction=instruction, timeout_s=timeout_s
                )
                scores += found.scores
                num_tokens += found.usage.prompt_tokens
        return scores, num_tokens

    scores, num_tokens = asyncio.run(run())
    order = sorted(range(len(texts)), key=lambda index: -scores[index])
    for index in order[:top_n]:
        line = {"index": index, "score": scores[index], "document": texts[index]}
        echo(json.dumps(line, ensure_ascii=False))
    echo(f"{num_tokens} tokens", err=True)


def _given(texts: list[str] | None) -> list[str]:
    """Returns the texts of the command line, or else the lines of standard input."""
    found = texts or [line for line in sys.stdin.read().splitlines() if line]
    if not found:
        raise typer.BadParameter("there is no text, neither here nor on standard input")
    return found


def _batches(texts: Sequence[str]) -> list[tuple[int, Sequence[str]]]:
    """Returns the texts of each request, with the index of the first."""
    return [(first, texts[first : first + BATCH]) for first in range(0, len(texts), BATCH)]
