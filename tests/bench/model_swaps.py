"""Two models that share a card under load: the time of swaps, and whether a stream is lost.

    python -m tests.bench.model_swaps --shape qwen3-8b --folder /tmp/models --out swaps.json

`octavo serve` runs the same checkpoint under two names. The floors of level 1 are copies of the
weights at the measured speed. Streams of both are open all the time; each must end with all the
tokens that it asked for.
"""

import argparse
import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import torch

from tests.bench.model_folder import shape_names
from tests.bench.report import Report
from tests.bench.rounds import rounds
from tests.bench.sleep_times import checkpoint, copy_speeds

NAMES = ("first", "second")
START_S = 600.0
PROMPT_WORDS = 200


@dataclass
class Streams:
    """Streams that ended, and why others did not."""

    num_done: int = 0
    num_tokens: int = 0
    lost: list[str] = field(default_factory=list)
    first_token_s: dict[str, list[float]] = field(
        default_factory=lambda: {name: [] for name in NAMES}
    )

    async def run(
        self, client: httpx.AsyncClient, model: str, *, max_tokens: int, end_s: float
    ) -> None:
        """Keeps one stream of a model open until a time."""
        for _ in rounds(end_s):
            words = f"{len(self.first_token_s[model])} " + "word " * PROMPT_WORDS
            body = {
                "model": model, "prompt": words, "max_tokens": max_tokens, "ignore_eos": True,
                "stream": True, "stream_options": {"include_usage": True}, "temperature": 0,
            }  # fmt: skip
            started_s, num_tokens = time.monotonic(), 0
            try:
                async with client.stream("POST", "/v1/completions", json=body) as answer:
                    async for line in answer.aiter_lines():
                        if not line.startswith("data: {"):
                            continue
                        if not num_tokens:
                            self.first_token_s[model].append(time.monotonic() - started_s)
                        event = json.loads(line.removeprefix("data: "))
                        usage = event.get("usage") or {}
                        num_tokens = max(1, usage.get("completion_tokens", 1))
                        if "error" in event:
                            self.lost.append(str(event["error"]))
            except httpx.HTTPError as error:
                self.lost.append(repr(error))
            if num_tokens != max_tokens:
                self.lost.append(f"{model}: {num_tokens} of {max_tokens} tokens")
            self.num_done += 1
            self.num_tokens += num_tokens


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=shape_names(), default="qwen3-8b")
    parser.add_argument("--folder", type=Path, help="for the checkpoint; one that is there is used")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--streams", type=int, default=16, help="of each model")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--swap-level", type=int, default=1)
    parser.add_argument("--swap-min-awake-s", type=float, default=10)
    parser.add_argument("--swap-drain-s", type=float, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="")
    arguments = parser.parse_args()
    report = Report(
        "model_swaps", path=arguments.out, shape=arguments.shape, commit_name=arguments.commit
    )
    with tempfile.TemporaryDirectory() as made:
        folder = checkpoint(arguments, Path(made))
        models = [Path(made) / name for name in NAMES]
        for model in models:
            model.symlink_to(folder.resolve())
        speeds = copy_speeds(torch.device(arguments.device))
        if arguments.device == "cuda":
            torch.cuda.empty_cache()
        num_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        report.state("weights of a model, bytes", num_bytes)
        floors = (num_bytes / speeds.from_device, num_bytes / speeds.to_device)
        _measure(arguments, models, Path(made) / "serve.log", report, floors=floors)
    print(report.table())
    sys.exit(bool(report.content["problems"]))


def _measure(
    arguments: argparse.Namespace,
    models: Sequence[Path],
    log: Path,
    report: Report,
    *,
    floors: tuple[float, float],
) -> None:
    flags = [f"--model={model}" for model in models]
    flags += [f"--served-model-name={name}" for name in NAMES]
    flags += [f"--device={arguments.device}", "--port=0", "--engine-port=0", "--http-port=0"]
    flags += ["--max-model-len=2048"]
    flags += [
        f"--{name.replace('_', '-')}={getattr(arguments, name)}"
        for name in ("swap_level", "swap_min_awake_s", "swap_drain_s")
    ]
    with log.open("wb") as output:
        serving = subprocess.Popen(
            [sys.executable, "-m", "services.client", "serve", *flags], stdout=output, stderr=output
        )
    try:
        url = _wait_for_url(log, serving)
        streams = asyncio.run(_load(arguments, url))
        awake = [event for event in _swaps(log) if event["asleep"]]
    finally:
        serving.terminate()
        serving.wait(60)
    for line in log.read_text().splitlines():
        if re.match(r"engine-\d: \w+ (loaded|awake)", line):
            report.note(line)
    report.state("streams that ended", streams.num_done)
    report.state("requests kept asleep", sum(event["num_kept"] for event in awake))
    for lost in streams.lost:
        report.problem(f"a stream was lost: {lost}")
    if not awake:
        report.problem("there was no swap")
        return
    # At level 2 weights are not copied; sleep_times has the time of their loading.
    sleep_s, wake_s = floors if arguments.swap_level == 1 else (None, None)
    report.add("falling asleep", [event["sleep_s"] for event in awake], "s", floor=sleep_s)
    report.add("waking", [event["wake_s"] for event in awake], "s", floor=wake_s)
    report.add("swap", [event["sleep_s"] + event["wake_s"] for event in awake], "s")
    for name, times_s in streams.first_token_s.items():
        report.add(f"first token, {name}", times_s, "s")
    rate = streams.num_tokens / arguments.seconds
    report.add("throughput", [rate], "tokens/s", "higher")


def _wait_for_url(log: Path, serving: "subprocess.Popen[bytes]") -> str:
    end_s = time.monotonic() + START_S
    while True:
        text = log.read_text()
        if found := re.search(r"over HTTP: +(http://\S+)/v1", text):
            return found[1]
        if serving.poll() is not None or time.monotonic() > end_s:
            raise SystemExit(f"octavo serve did not start:\n{text[-4000:]}")
        time.sleep(0.1)


async def _load(arguments: argparse.Namespace, url: str) -> Streams:
    streams, end_s = Streams(), time.monotonic() + arguments.seconds
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client,
        asyncio.TaskGroup() as tasks,
    ):
        for _ in range(arguments.streams):
            for name in NAMES:
                tasks.create_task(
                    streams.run(client, name, max_tokens=arguments.max_tokens, end_s=end_s)
                )
    return streams


def _swaps(log: Path) -> list[dict]:
    lines = [line for line in log.read_text().splitlines() if '"models_swapped"' in line]
    return [json.loads(line) for line in lines]


if __name__ == "__main__":
    main()
