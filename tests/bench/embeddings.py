"""Vectors of short and of long inputs, beside the least time of their products.

python -m tests.bench.embeddings --shape qwen3-0.6b --max-num-seqs 256

The inputs of one length come at once. The floor is that of products and attention's arithmetic.
"""

from tests.bench.floor import FLOP_PER_MS, StepFloor
from tests.bench.offline import known_floor
from tests.bench.offline_engine import offline_engine
from tests.bench.program import run_program
from tests.bench.report import Report
from tests.bench.settings import PEER_SETTINGS, Settings, list_of_numbers, make_parser
from tests.bench.workload import fitted, fixed_jobs


def main() -> None:
    """Measures and prints a table."""
    parser = make_parser(__doc__ or "", budget_s=120)
    parser.add_argument(
        "--lengths", type=list_of_numbers, default=[32, 128, 512, 4096], help="tokens of an input"
    )
    parser.add_argument("--tokens", type=int, default=2**18, help="of all inputs of a length")
    parser.add_argument("--repeats", type=int, default=3)
    run_program("embeddings", parser, _measure, defaults={**PEER_SETTINGS, "task": "embed"})


async def _measure(settings: Settings, report: Report) -> None:
    arguments, floor = settings.arguments, known_floor(settings, report)
    async with offline_engine(settings.config) as engine:
        await engine.wait_until_captured()
        for length in arguments.lengths:
            count = max(1, arguments.tokens // length)
            before, times_s = engine.graph_use(), []
            for repeat in range(arguments.repeats + 1):
                jobs = fixed_jobs(count, length, 1, seed=length + 7919 * repeat)
                limits = {
                    "vocab_size": settings.model.vocab_size,
                    # A vector takes no position, unlike the token that it stands for.
                    "max_model_len": settings.max_model_len + 1,
                }
                times_s.append((await engine.generate(fitted(jobs, **limits))).elapsed_s)
            name = f"{count} inputs of {length}"
            least_s = None if floor is None else _least_s(floor, count, length)
            report.add(name, times_s[1:], "s", floor=least_s)
            rates = [count * length / time_s for time_s in times_s[1:]]
            report.add(f"{name}, rate", rates, "tokens/s", "higher")
            report.state(f"steps, {name}", engine.graph_use().since(before))


def _least_s(floor: StepFloor, count: int, length: int) -> float:
    """Returns the seconds that the arithmetic of inputs takes."""
    flop = floor.token_flop(count * length, 0) + count * floor.prompt_attention_flop(length)
    return flop / FLOP_PER_MS / 1000


if __name__ == "__main__":
    main()
