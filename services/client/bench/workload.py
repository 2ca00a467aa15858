"""Which requests a benchmark sends, and when."""

import random
from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How many requests of which size, and how they arrive.

    Raises:
        ValueError: a value makes no sense.
    """

    num_requests: Annotated[int, "Requests to send."] = 100
    rate: Annotated[
        float | None, "Open loop: requests per second, arriving at random (Poisson)."
    ] = None
    concurrency: Annotated[int, "Closed loop: requests kept running; unused with --rate."] = 8
    prompt_tokens: Annotated[str, "Prompt length in tokens: a number, or LOW-HIGH."] = "32-128"
    output_tokens: Annotated[str, "Output length in tokens: a number, or LOW-HIGH."] = "32-128"
    seed: Annotated[int, "Seed of lengths, prompts and arrivals."] = 0

    def __post_init__(self) -> None:
        """Checks every value."""
        if self.num_requests < 1 or self.concurrency < 1:
            raise ValueError("--num-requests and --concurrency must be at least 1")
        if self.rate is not None and self.rate <= 0:
            raise ValueError(f"--rate must be above 0, not {self.rate}")
        _read_range(self.prompt_tokens)
        _read_range(self.output_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """One request of a benchmark."""

    arrival_s: float
    """Seconds after the start; 0 for all in a closed loop."""
    prompt_tokens: int
    output_tokens: int
    seed: int
    """Seed of the prompt's content."""


def plan(load: Load) -> list[PlannedRequest]:
    """Draws a load's requests, the same ones for the same seed."""
    rng = random.Random(load.seed)
    prompt_low, prompt_high = _read_range(load.prompt_tokens)
    output_low, output_high = _read_range(load.output_tokens)
    arrival_s = 0.0
    planned = []
    for _ in range(load.num_requests):
        if load.rate is not None:
            arrival_s += rng.expovariate(load.rate)
        planned.append(
            PlannedRequest(
                arrival_s=arrival_s,
                prompt_tokens=rng.randint(prompt_low, prompt_high),
                output_tokens=rng.randint(output_low, output_high),
                seed=rng.getrandbits(32),
            )
        )
    return planned


def _read_range(text: str) -> tuple[int, int]:
    low_text, dash, high_text = text.partition("-")
    try:
        low, high = int(low_text), int(high_text if dash else low_text)
    except ValueError:
        low, high = 0, 0
    if not 1 <= low <= high:
        raise ValueError(f"a length must be a number or LOW-HIGH, at least 1, not {text!r}")
    return low, high
