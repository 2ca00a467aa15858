"""How answers look in a terminal."""

import json
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from services.client.console import echo
from services.client.responses import Chunk, Completion
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
        reasoning = f" ({usage.reasoning_tokens} of reasoning)" if usage.reasoning_tokens else ""
        cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
        decode_s = self.elapsed_s - self.ttft_s
        rate = f", {(usage.output_tokens - 1) / decode_s:.0f} tokens/s" if decode_s > 0 else ""
        return (
            f"{usage.prompt_tokens} prompt tokens{cached}, "
            f"{usage.output_tokens} output tokens{reasoning}, finish reason {reason.value}; "
            f"first token after {self.ttft_s * 1000:.0f} ms{rate}"
        )


class _Writer:
    """Writes one answer as it comes."""

    def __init__(self) -> None:
        self._is_reasoning = False
        self._has_line = False
        """Whether standard output is inside a line."""

    def write(self, chunk: Chunk) -> None:
        """Writes the news of the answer."""
        if chunk.reasoning:
            self._is_reasoning = True
            echo(chunk.reasoning, dim=True, nl=False, err=True)
        if chunk.text or chunk.tool_calls:
            self._end_reasoning()
        if chunk.text:
            self._has_line = True
            echo(chunk.text, nl=False)
        for piece in chunk.tool_calls:
            if piece.name:
                self._end_line()
                echo(f"{piece.name} ", nl=False)
            self._has_line = True
            echo(piece.arguments, nl=False)

    def end(self) -> None:
        """Ends the last line; an empty answer is an empty line."""
        self._end_reasoning()
        echo()

    def _end_line(self) -> None:
        if self._has_line:
            echo()

    def _end_reasoning(self) -> None:
        if self._is_reasoning:
            self._is_reasoning = False
            echo(err=True)


async def show(stream: Stream) -> Answer:
    """Writes an answer to standard output as it comes, and a line break after it.

    Reasoning goes to standard error. Each tool call has a line of its own: its name, a space and
    its arguments. The first of several answers is streamed; the others follow as a whole, each
    under its number.
    """
    writer = _Writer()
    answers: defaultdict[int, Completion] = defaultdict(Completion)
    started = time.perf_counter()
    ttft_s = None
    async for chunk in stream:
        if ttft_s is None and chunk.token_ids:
            ttft_s = time.perf_counter() - started
        if chunk.index == 0:
            writer.write(chunk)
        answers[chunk.index].add(chunk)
    elapsed_s = time.perf_counter() - started
    writer.end()
    for index, other in sorted(answers.items())[1:]:
        calls = (f"{call.name} {call.arguments}" for call in other.tool_calls)
        echo("\n".join([f"--- {index + 1}", *filter(None, [other.text]), *calls]))
    completion = answers[0]
    completion.usage = chunk.usage
    return Answer(completion=completion, ttft_s=ttft_s or elapsed_s, elapsed_s=elapsed_s)


async def show_once(stream: Stream, *, as_json: bool) -> None:
    """Writes an answer, and what it cost to standard error; or its chunks as lines of JSON."""
    if as_json:
        await show_json(stream)
        return
    answer = await show(stream)
    echo(answer.summary(), err=True)


async def show_json(stream: Stream) -> None:
    """Writes each chunk of an answer to standard output, as one line of JSON."""
    async for chunk in stream:
        echo(json.dumps(asdict(chunk), default=lambda reason: reason.value))
