"""Every way of drafting, on one model: `python -m tests.bench.drafts`.

    python -m tests.bench.drafts --model models/checkpoints/tiny --device cpu
    python -m tests.bench.drafts --shape qwen3-8b --ways none,ngram,head

EngineCore runs in this process and the worker in its own. A checkpoint gets chats and texts; a
shape gets random weights, for the head too, and random tokens: nothing is guessed right, which
leaves the cost. `itself` takes the model as its own draft model: always right, and as slow as it
can be. *fixed* drafts as many tokens in every step, *adaptive* as many as the scheduler chooses.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from models.config import ModelConfig
from services.engine.config.checkpoint import TINY_CHECKPOINT
from services.engine.config.engine_config import EngineConfig
from services.engine.worker.rank_process import WorkerDiedError
from tests.bench.kv_accuracy import prompts
from tests.bench.offline_engine import EngineFailedError, OfflineEngine, offline_engine
from tests.bench.program import run_program
from tests.bench.report import Report
from tests.bench.settings import Settings, list_of, list_of_numbers, make_parser
from tests.bench.workload import Job

WAYS = ("none", "ngram", "itself", "head")
TINY_HEAD = TINY_CHECKPOINT.with_name("tiny_eagle3")
PROMPT_LENGTH = 128
HEAD_VOCAB_SIZE = 32000


def write_random_head(folder: Path, model: ModelConfig) -> Path:
    """Writes the config.json of an EAGLE-3 head for a model; returns its folder."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "draft_vocab_size": min(HEAD_VOCAB_SIZE, model.vocab_size),
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def variants(settings: Settings, folder: Path) -> Iterator[tuple[str, EngineConfig]]:
    """Yields the name and the engine of each way that was asked for."""
    arguments, config = settings.arguments, settings.config
    is_tiny = config.checkpoint.model.resolve() == TINY_CHECKPOINT.resolve()
    for way in arguments.ways:
        if way == "none":
            yield way, config
            continue
        flags: dict[str, object] = {"num_speculative_tokens": arguments.drafts}
        if way == "ngram":
            flags["speculative_method"] = "ngram"
        elif way == "itself":
            flags["draft_model"] = config.checkpoint.model
        else:
            head = TINY_HEAD if is_tiny else write_random_head(folder / "head", settings.model)
            flags["draft_model"] = head
        fixed = {**flags, "min_speculative_tokens": arguments.drafts}
        yield f"{way}, fixed", config.with_flags(**fixed)
        yield f"{way}, adaptive", config.with_flags(**flags, min_speculative_tokens=0)


def make_jobs(settings: Settings, count: int) -> list[Job]:
    """Returns as many requests."""
    arguments = settings.arguments
    if arguments.model is not None:
        made = prompts(settings.config.checkpoint.model, count)
    else:
        rng = random.Random(0)
        made = [
            [rng.randrange(settings.model.vocab_size) for _ in range(PROMPT_LENGTH)]
            for _ in range(count)
        ]
    return [Job(prompt, arguments.outputs) for prompt in made]


async def measure(engine: OfflineEngine, name: str, settings: Settings, report: Report) -> None:
    """Measures all batch sizes of one way."""
    arguments = settings.arguments
    await engine.wait_until_captured()
    for batch in arguments.batches:
        jobs, values = make_jobs(settings, batch), []
        await engine.generate(jobs)
        counters = engine.core.counters
        drafts, idle_us = counters.drafts, []
        before = drafts.num_verifications, drafts.num_accepted
        for _ in range(arguments.repeats):
            busy_us, num_steps = counters.worker_busy_us, counters.num_steps
            done = await engine.generate(jobs)
            busy_us, num_steps = counters.worker_busy_us - busy_us, counters.num_steps - num_steps
            idle_us.append((1e6 * done.elapsed_s - busy_us) / num_steps)
            decoding_s = done.elapsed_s - max(done.ttft_s)
            values.append(1000 * decoding_s / (arguments.outputs - 1))
        report.add(f"{name}, batch {batch}", values, "ms/token")
        report.add(f"{name}, batch {batch}, worker idle", idle_us, "us/step")
        verified = drafts.num_verifications - before[0]
        if verified:
            accepted = (drafts.num_accepted - before[1]) / verified
            report.state(f"{name}, batch {batch}, drafts that held", round(accepted, 2))


async def measure_all(settings: Settings, report: Report) -> None:
    """Measures each way."""
    with TemporaryDirectory(prefix="octavo-head-") as folder:
        for name, config in variants(settings, Path(folder)):
            try:
                async with offline_engine(config) as engine:
                    await measure(engine, name, settings, report)
            except (WorkerDiedError, EngineFailedError) as error:
                report.problem(f"{name}: {error}")


def main() -> None:
    """Measures and prints."""
    parser = make_parser(__doc__)
    parser.add_argument("--ways", type=list_of(*WAYS), default=[*WAYS], help="ways of drafting")
    parser.add_argument("--batches", type=list_of_numbers, default=[1, 8, 32])
    parser.add_argument("--drafts", type=int, default=3, help="most drafts of a request in a step")
    parser.add_argument("--outputs", type=int, default=128, help="tokens of each request")
    parser.add_argument("--repeats", type=int, default=3)
    run_program("drafts", parser, measure_all)


if __name__ == "__main__":
    main()
