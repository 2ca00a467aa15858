"""`octavo why`: where the time of a request went."""

from collections.abc import Iterator
from typing import Annotated

import typer
from google.protobuf.json_format import MessageToJson
from rich.table import Table
from rich.text import Text

from protos.common.v1.request_story_pb2 import RequestStage, RequestStory
from protos.engine.v1.engine_pb2 import ExplainRequestRequest
from protos.engine.v1.engine_pb2_grpc import EngineServiceStub
from protos.frontend.v1.frontend_pb2 import EngineStory, ExplainRequestResponse, FrontendStory
from services.client.calls import ask, ask_frontend
from services.client.channel import Access
from services.client.console import TerminalConsole, echo
from services.client.flags import DEFAULT_FRONTEND, FrontendAddress, TimeoutSeconds, checked

_STAGES = {
    "PREPARED": "its grammar was compiled",
    "QUEUED": "waited until earlier requests had started",
    "FULL_STEP": "waited: running requests used all tokens of the steps (max_num_batched_tokens)",
    "FULL_ROWS": "waited: as many requests ran as may (max_num_seqs)",
    "FULL_CACHE": "waited for free blocks of the KV cache",
    "SAME_PREFIX": "waited for a request that was computing the same prefix",
    "GRAMMAR": "waited for its grammar",
    "IMAGE": "waited for an image to be encoded",
    "LOADING": "waited for blocks from the host's memory or from disk",
    "ADAPTER": "waited for a slot of its adapter (max_loras)",
    "ALONE": "waited for a suspect that had to run alone",
    "NO_WORKER": "waited for a new worker",
    "PREFILL": "prefill",
    "DECODE": "decode",
}

Row = tuple[str, float | None, str]
"""Service, seconds, and a text."""


def why(
    request_id: Annotated[
        str, typer.Argument(help="The request's id, as in its answer, x-request-id or the log.")
    ],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    frontend: FrontendAddress = DEFAULT_FRONTEND,
    engine: Annotated[
        str | None,
        typer.Option(
            callback=checked,
            help="Ask this engine, as host:port, alone; for requests that came from elsewhere.",
        ),
    ] = None,
    timeout_s: TimeoutSeconds = 10.0,
    access: Access,
) -> None:
    """Shows where the time of a live or a recent request went.

    Frontend and engines remember the last 4,096 requests each. With API keys those of other keys
    are unknown.

    Examples:
    - `octavo why 5f0c1e0b`

    - `octavo why chatcmpl-5f0c1e0b --json`

    - `octavo why 5f0c1e0b --engine 127.0.0.1:50051`
    """
    if engine is None:
        story = ask_frontend(
            frontend, access, lambda each: each.explain_request(request_id, timeout_s=timeout_s)
        )
    else:
        request = ExplainRequestRequest(request_id=request_id)
        answer = ask(
            EngineServiceStub,
            engine,
            access.tls,
            lambda stub: stub.ExplainRequest(request, timeout=timeout_s),
        )
        part = EngineStory(address=engine, story=answer.story)
        story = ExplainRequestResponse(engines=[part])
    if as_json:
        echo(MessageToJson(story, preserving_proto_field_name=True))
        return
    table = Table("where", "seconds", "what", box=None, pad_edge=False)
    table.columns[1].justify = "right"
    for where, seconds, what in rows(story):
        table.add_row(where, "" if seconds is None else f"{seconds:.3f}", Text(what))
    TerminalConsole().print(table)


def rows(story: ExplainRequestResponse) -> Iterator[Row]:
    """Yields a line for each part of the time, and for what else happened."""
    if story.HasField("frontend"):
        yield from _frontend_rows(story.frontend)
    for part in story.engines:
        yield from _engine_rows(part)


def _frontend_rows(story: FrontendStory) -> Iterator[Row]:
    yield "frontend", story.duration_s, f"{story.method}, {_state(story.end)}"
    for name, what in (
        ("tokenize_s", "until the prompt was encoded"),
        ("submit_s", "until an engine had admitted it"),
        ("first_output_s", "until the first output"),
        ("stream_s", "from there on"),
    ):
        if story.HasField(name):
            yield "", getattr(story, name), what
    if story.unread_s >= 0.0005:
        yield "", story.unread_s, "output lay unread: the caller was slow, or the frontend busy"


def _engine_rows(part: EngineStory) -> Iterator[Row]:
    where = f"engine {part.address}".rstrip()
    if part.HasField("story"):
        yield from _story_rows(where, part.story)
    else:
        yield where, None, f"unknown: {part.missing}"
    if part.left_because:
        yield "", None, f"left for another engine: {part.left_because}"


def _story_rows(where: str, story: RequestStory) -> Iterator[Row]:
    tokens = (
        f"{story.prompt_tokens} prompt tokens ({story.cached_tokens} cached),"
        f" {story.output_tokens} of output"
    )
    yield where, story.duration_s, f"{_state(story.end)}: {tokens}"
    for each in story.stages:
        name = RequestStage.Name(each.stage).removeprefix("REQUEST_STAGE_")
        yield "", each.seconds, _STAGES.get(name, name.lower()) + _steps(story, name)
    if story.HasField("longest_gap"):
        gap = story.longest_gap
        yield (
            "",
            gap.seconds,
            f"of these: the longest step, {gap.step_id}, with {gap.num_tokens} tokens of"
            f" {gap.batch_size} requests",
        )
    if story.resumed_tokens:
        yield "", None, f"{story.resumed_tokens} tokens of output came from another engine"
    if story.num_preemptions:
        yield "", None, f"preempted {_times(story.num_preemptions)}: blocks ran out"
    if story.num_losses:
        yield "", None, f"a worker was lost under it {_times(story.num_losses)}"
    if story.num_recomputed_tokens:
        yield "", None, f"{story.num_recomputed_tokens} computed tokens were lost"


def _steps(story: RequestStory, stage: str) -> str:
    if stage == "PREFILL" and story.HasField("num_prefill_steps"):
        return f" in {_count(story.num_prefill_steps, 'step')}"
    if stage == "DECODE" and story.HasField("num_decode_steps"):
        return f" in {_count(story.num_decode_steps, 'step')}"
    return ""


def _state(end: str) -> str:
    return f"ended ({end})" if end else "still live"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
