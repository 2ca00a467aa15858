"""The prompts and lengths that every benchmark sends; easy to make again in any language.

All numbers come from one splitmix64 generator (Steele, Lea and Flood 2014, "Fast splittable
pseudorandom number generators") and a modulus, so that other engines can be sent the same work.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import log1p

from services.engine.prompt_image import PromptImage

SERVING_SEED = 20261120
MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Job:
    """One request: its prompt, how many tokens it asks for, and the images in the prompt."""

    prompt: list[int]
    num_output: int
    images: tuple[PromptImage, ...] = ()


def splitmix64(seed: int) -> Iterator[int]:
    """Yields 64-bit numbers for ever."""
    state = seed & MASK
    while True:
        state = (state + 0x9E3779B97F4A7C15) & MASK
        mixed = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK
        yield mixed ^ (mixed >> 31)


def serving_jobs(count: int = 512, seed: int = SERVING_SEED) -> list[Job]:
    """Returns the serving workload: prompts of 64 to 1024 tokens, outputs of 64 to 512.

    Numbers are drawn per request in this order: prompt length, output length, prompt.
    """
    numbers = splitmix64(seed)
    jobs = []
    for _ in range(count):
        prompt_len = 64 + next(numbers) % 961
        num_output = 64 + next(numbers) % 449
        jobs.append(Job(token_ids(numbers, prompt_len), num_output))
    return jobs


def arrival_times(rate: float, seconds: float, seed: int = SERVING_SEED) -> list[float]:
    """Returns the times of a Poisson process of `rate` a second, at least one, in seconds."""
    numbers = splitmix64(seed)
    times = []
    now = 0.0
    while not times or now < seconds:
        now -= log1p(-(next(numbers) >> 11) / 2**53) / rate
        if now < seconds or not times:
            times.append(now)
    return times


def fixed_jobs(count: int, prompt_len: int, num_output: int, seed: int = 1) -> list[Job]:
    """Returns requests of one length; another seed gives other prompts, none a prefix of these."""
    numbers = splitmix64(seed)
    return [Job(token_ids(numbers, prompt_len), num_output) for _ in range(count)]


def fitted(
    jobs: Sequence[Job], *, vocab_size: int, max_model_len: int, divide_by: int = 1
) -> list[Job]:
    """Returns jobs that a model can take: ids below vocab_size, lengths within max_model_len.

    A model with a full-size vocabulary and context gets them as they are.

    Args:
        jobs: what to fit.
        vocab_size: ids are taken modulo this.
        max_model_len: prompt and output together are cut to this, the output first.
        divide_by: lengths are divided by this, for trial runs on a slow machine.
    """
    small = []
    for job in jobs:
        prompt_len = max(1, min(len(job.prompt) // divide_by, max_model_len - 1))
        num_output = max(1, min(job.num_output // divide_by, max_model_len - prompt_len))
        small.append(Job([i % vocab_size for i in job.prompt[:prompt_len]], num_output))
    return small


def token_ids(numbers: Iterator[int], count: int) -> list[int]:
    """Draws the ids of a prompt."""
    return [1000 + next(numbers) % 100_000 for _ in range(count)]
