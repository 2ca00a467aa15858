"""How answers look in a terminal."""

import json
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from services.client.responses import Completion
from services.client.stream import Stream

AsJson = Annotated[
    bool, typer.Option("--json", help="Print each chunk as one line of JSON, with token ids.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer that was shown, and how fast it came."""

    completion: Completion
    ttft_s: float
    """Seconds from asking to the first token."""
    elapsed_s: float
    """Seconds from asking to the end."""

    def summary(self) -> str:
        """Returns one line: tokens, reason, time to first token and rate."""
        usage, reason = self.completion.usage, self.completion.finish_reason
        if usage is None or reason is None:
            raise ValueError("only a complete answer has a summary")
        cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
        decode_s = self.elapsed_s - self.ttft_s
        rate = f", {(usage.output_tokens - 1) / decode_s:.0f} tokens/s" if decode_s > 0 else ""
        return (
            f"{usage.prompt_tokens} prompt tokens{cached}, {usage.output_tokens} output tokens, "
            f"finish reason {reason.value}; first token after {self.ttft_s * 1000:.0f} ms{rate}"
        )


async def show(stream: Stream) -> Answer:
    """Writes an answer to standard output as it comes, and a line break after it.

    The first of several answers is streamed; the others follow as a whole, each under its number.
    """
    answers: defaultdict[int, Completion] = defaultdict(Completion)
    started = time.perf_counter()
    ttft_s = None
    async for chunk in stream:
        if ttft_s is None and chunk.token_ids:
            ttft_s = time.perf_counter() - started
        if chunk.index == 0:
            typer.echo(chunk.text, nl=False)
        answers[chunk.index].add(chunk)
    elapsed_s = time.perf_counter() - started
    typer.echo()
    for index, other in sorted(answers.items())[1:]:
        typer.echo(f"--- {index + 1}\n{other.text}")
    completion = answers[0]
    completion.usage = chunk.usage
    return Answer(completion=completion, ttft_s=ttft_s or elapsed_s, elapsed_s=elapsed_s)


async def show_json(stream: Stream) -> None:
    """Writes each chunk of an answer to standard output, as one line of JSON."""
    async for chunk in stream:
        typer.echo(json.dumps(asdict(chunk), default=lambda reason: reason.value))
