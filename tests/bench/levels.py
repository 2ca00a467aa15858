"""Every compilation level with every graph mode, in one table: `python -m tests.bench.levels`.

    python -m tests.bench.levels --shape qwen3-0.6b --out levels.json [engine flags]
    python -m tests.bench.levels --shape qwen3-8b --levels 0,3 --modes none,full_and_piecewise

Each configuration runs in fresh workers: one with empty caches (cold), and one with what the first
left in them (warm), which is measured. With --skip-cold there is one worker, with the caches of the
user, and with --only-cold the other one, of which only the start is measured. A configuration that
fails or takes too long is a row that says so. Outputs are compared with those of level 0 without
graphs, which runs first.
"""

import argparse
import asyncio
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product

import uvloop

from services.engine.worker.rank_process import WorkerDiedError
from tests.bench.empty_caches import empty_caches
from tests.bench.figures import Bench
from tests.bench.offline_engine import EngineFailedError, offline_engine
from tests.bench.program import reported
from tests.bench.report import Report
from tests.bench.settings import Budget, Settings, list_of, list_of_numbers, make_parser

LEVELS = (0, 1, 2, 3)
MODES = ("none", "full_decode_only", "full", "piecewise", "full_and_piecewise")
NEED_PIECES = ("piecewise", "full_and_piecewise")
NO_PIECES = 1
"""Level that has no graphs of pieces."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One row: a compilation level and a graph mode."""

    level: int
    mode: str

    @property
    def name(self) -> str:
        """How the row is called."""
        return f"level {self.level} {self.mode}"

    @property
    def is_eager(self) -> bool:
        """Whether the others are compared with this one."""
        return self.level == 0 and self.mode == "none"


def choices(levels: list[int], modes: list[str]) -> list[Choice]:
    """Returns the rows that make sense, the eager one first where it is asked for."""
    found = [
        Choice(level, mode)
        for level, mode in product(sorted(levels), [mode for mode in MODES if mode in modes])
        if mode not in NEED_PIECES or level != NO_PIECES
    ]
    return sorted(found, key=lambda choice: not choice.is_eager)


def agreement(outputs: list[list[int]], eager: list[list[int]]) -> dict[str, float]:
    """Returns how many requests are equal, and the share of tokens before any difference."""
    pairs = list(zip(outputs, eager, strict=True))
    num_same = 0
    for ours, theirs in pairs:
        for a, b in zip(ours, theirs, strict=True):
            if a != b:
                break
            num_same += 1
    return {
        "num_requests": len(pairs),
        "num_equal": sum(ours == theirs for ours, theirs in pairs),
        "equal_tokens": num_same / max(1, sum(len(theirs) for _, theirs in pairs)),
    }


class Comparison:
    """Measures the rows one after the other."""

    def __init__(self, settings: Settings, report: Report) -> None:
        self._settings = settings
        self._report = report
        self._eager: list[list[int]] | None = None
        self.rows: dict[str, dict] = {}

    async def run(self, chosen: list[Choice]) -> None:
        """Measures every row that there is time for."""
        arguments = self._settings.arguments
        for choice in chosen:
            limit_s = min(arguments.row_budget_s, self._settings.budget.left_s)
            self.rows[choice.name] = {"error": ""}
            if limit_s < 1:
                self._fail(choice, "out of time")
                continue
            try:
                async with asyncio.timeout(limit_s):
                    await self._measure(choice, Budget(limit_s))
            except TimeoutError:
                self._fail(choice, f"not done within {limit_s:.1f} s")
            except (WorkerDiedError, EngineFailedError, ValueError) as error:
                self._fail(choice, str(error))
            self._report.state("rows", self.rows)

    async def _measure(self, choice: Choice, budget: Budget) -> None:
        arguments, row = self._settings.arguments, self.rows[choice.name]
        with ExitStack() as stack:
            changes: dict[str, object] = {
                "compilation_level": choice.level,
                "cudagraph_mode": choice.mode,
                # In the background the parts of a start could not be distinguished.
                "capture_while_serving": False,
            }
            if not arguments.skip_cold:
                changes["compile_cache_dir"] = stack.enter_context(empty_caches())
            config = self._settings.config.with_flags(**changes)
            if not arguments.skip_cold:
                async with offline_engine(config) as engine:
                    row["cold"] = await self._bench(engine, budget).start()
                    row["graphs"] = engine.graph_facts()
                self._report.add(f"{choice.name}, cold start", [row["cold"]["ready"]], "s")
                if arguments.only_cold:
                    return
            async with offline_engine(config) as engine:
                bench = self._bench(engine, budget)
                row["warm"] = await bench.start()
                row["graphs"] = engine.graph_facts()
                await self._take_figures(choice, bench)

    async def _take_figures(self, choice: Choice, bench: Bench) -> None:
        arguments, row = self._settings.arguments, self.rows[choice.name]
        for batch in arguments.batches:
            values = await bench.decode(batch, arguments.repeats, arguments.decode_output)
            self._report.add(f"{choice.name}, decode, batch {batch}", values, "ms/step")
        for prompt_len in arguments.prompts:
            values = await bench.prefill(prompt_len, arguments.repeats)
            self._report.add(f"{choice.name}, prefill, {prompt_len} tokens", values, "ms")
        before = bench.engine.graph_use()
        generated = await bench.engine.generate(bench.serving(arguments.requests))
        row["serving"] = bench.engine.graph_use().since(before)
        self._report.add(f"{choice.name}, serving", [generated.elapsed_s], "s")
        if choice.is_eager:
            self._eager = generated.outputs
        if self._eager is not None:
            row["agreement"] = agreement(generated.outputs, self._eager)

    def _bench(self, engine, budget: Budget) -> Bench:
        return Bench(
            engine,
            self._report,
            budget,
            vocab_size=self._settings.model.vocab_size,
            max_model_len=self._settings.max_model_len,
            divide_by=self._settings.arguments.divide_by,
        )

    def _fail(self, choice: Choice, why: str) -> None:
        self.rows[choice.name]["error"] = why
        self._report.problem(f"{choice.name}: {why}")


def table(report: Report, rows: dict[str, dict], arguments: argparse.Namespace) -> str:
    """Returns one line per row; times of a start are compile / capture / to first token."""
    figures = [f"decode, batch {batch}" for batch in arguments.batches]
    figures += [f"prefill, {prompt_len} tokens" for prompt_len in arguments.prompts]
    titles = [f"b{batch}" for batch in arguments.batches]
    titles += [f"p{prompt_len}" for prompt_len in arguments.prompts]
    heads = "".join(f"{title:>8}" for title in titles)
    lines = [
        f"{'':26}{'cold s':>18}{'warm s':>18}{'MiB':>6}{heads}{'hits':>7}{'equal':>9}{'same':>7}",
        f"{'':26}{'cmp/cap/1st':>18}{'cmp/cap/1st':>18}",
    ]
    for name, row in rows.items():
        numbers = "".join(_median(report, f"{name}, {figure}") for figure in figures)
        graphs, serving, same = (row.get(key) for key in ("graphs", "serving", "agreement"))
        cells = [
            f"{_start_cell(row.get('cold')):>18}{_start_cell(row.get('warm')):>18}",
            f"{graphs['bytes'] / 2**20:6.0f}" if graphs else f"{'-':>6}",
            numbers,
            f"{serving['hit_rate'] or 0:7.1%}" if serving else f"{'-':>7}",
            f"{same['num_equal']}/{same['num_requests']}".rjust(9) if same else f"{'-':>9}",
            f"{same['equal_tokens']:7.1%}" if same else f"{'-':>7}",
        ]
        error = row["error"].partition("\n")[0][:80]
        lines.append(f"{name:26}{''.join(cells)}{'  ' + error if error else ''}")
    return "\n".join(lines)


def _start_cell(start: dict[str, float] | None) -> str:
    if start is None:
        return "-"
    return "/".join(f"{start[part]:.1f}" for part in ("compile", "all_captures", "first_token"))


def _median(report: Report, name: str) -> str:
    figure = report.figures.get(name)
    return f"{figure['median']:8.2f}" if figure else f"{'-':>8}"


def own_parser() -> argparse.ArgumentParser:
    """Returns the command line's parser."""
    parser = make_parser(__doc__)
    parser.add_argument("--levels", type=list_of_numbers, default=list(LEVELS))
    parser.add_argument("--modes", type=list_of(*MODES), default=[*MODES])
    parser.add_argument("--batches", type=list_of_numbers, default=[1, 8, 32, 128, 256])
    parser.add_argument("--prompts", type=list_of_numbers, default=[2048])
    parser.add_argument("--decode-output", type=int, default=97, help="tokens of a decode run")
    parser.add_argument("--requests", type=int, default=128, help="of the serving workload")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--row-budget-s", type=float, default=120, help="time for one row")
    starts = parser.add_mutually_exclusive_group()
    starts.add_argument("--skip-cold", action="store_true", help="one start, with today's caches")
    starts.add_argument("--only-cold", action="store_true", help="one start, with empty caches")
    parser.add_argument("--divide-by", type=int, default=1, help="make all lengths shorter")
    return parser


def main() -> None:
    """Measures and prints."""
    parser = own_parser()
    with reported("levels", parser) as (settings, report):
        arguments = settings.arguments
        if not set(arguments.levels) <= set(LEVELS):
            parser.error(f"--levels takes {LEVELS}")
        too_large = [b for b in arguments.batches if b > settings.config.scheduler.max_num_seqs]
        if too_large:
            parser.error(f"--batches: {too_large} exceed --max-num-seqs")
        comparison = Comparison(settings, report)
        uvloop.run(comparison.run(choices(arguments.levels, arguments.modes)))
    print(table(report, comparison.rows, arguments))
    raise SystemExit(0 if report.figures else 1)


if __name__ == "__main__":
    main()
