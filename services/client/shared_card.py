"""Several models on one card: their flags, whether the host holds them, and their first turns."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from protos.engine.v1.operator_pb2 import SleepMode, SleepRequest, WakeRequest
from protos.engine.v1.operator_pb2_grpc import OperatorServiceStub
from services.client.calls import connected
from services.client.errors import OctavoError
from services.client.serve_flags import ServeFlagError
from services.client.service_flags import read_flags
from services.client.supervisor import Service, ServiceFailedError, Supervisor

KEEP_WEIGHTS, DROP_WEIGHTS = 1, 2
"""Levels of sleep: weights go to the host's memory, or are loaded again."""
SHARING_FLAGS = ("--enable-sleep", "--start-asleep")
"""Flags of engines that share a card."""


def divide_among_models(words: Sequence[str], num_models: int) -> tuple[list[str], list[list[str]]]:
    """Returns the flags of all engines, and those of each model's alone.

    A flag that is given once is every model's; one that is given as often as there are models has
    their values in order.

    Args:
        words: --flag or --flag=value, from `divide_arguments`.
        num_models: at least two.

    Raises:
        ServeFlagError: a flag has another number of values, or is for one model.
    """
    values: dict[str, list[str]] = {}
    for word in words:
        name = word.partition("=")[0].removeprefix("--")
        values.setdefault(f"--{name.removeprefix('no-')}", []).append(word)
    for flag, given in values.items():
        if len(given) not in (1, num_models):
            raise ServeFlagError(
                f"{flag} is given {len(given)} times for {num_models} models: give it once for all,"
                " or once for each, in their order"
            )
    common = [given[0] for given in values.values() if len(given) == 1]
    divided = [given for given in values.values() if len(given) > 1]
    return common, [[given[index] for given in divided] for index in range(num_models)]


def take_adapters(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns words without --lora, and the values of --lora."""
    others = [word for word in words if not word.startswith("--lora=")]
    values = [word.partition("=")[2] for word in words if word.startswith("--lora=")]
    return others, [each for value in values for each in value.split(",")]


def adapters_of_models(adapters: Sequence[str], models: Sequence[str]) -> list[list[str]]:
    """Returns the flags of each model's adapters.

    Args:
        adapters: MODEL:NAME=PATH each.
        models: the names of the models.

    Raises:
        ServeFlagError: an adapter names no model, or a name is given twice.
    """
    flags: list[list[str]] = [[] for _ in models]
    names = list(models)
    for adapter in adapters:
        own = [index for index, model in enumerate(models) if adapter.startswith(f"{model}:")]
        if not own:
            raise ServeFlagError(
                f"--lora is {adapter[:200]!r}: with several models it must be MODEL:NAME=PATH, "
                f"with one of {', '.join(models)}"
            )
        index = max(own, key=lambda each: len(models[each]))
        flag = adapter[len(models[index]) + 1 :]
        names.append(flag.partition("=")[0])
        flags[index].append(f"--lora={flag}")
    for name in names[len(models) :]:
        if names.count(name) > 1:
            raise ServeFlagError(f"--lora gives {name!r} to two adapters, or to one and a model")
    return flags


def check_names(names: Sequence[str]) -> None:
    """Raises ServeFlagError if two models have one name."""
    for name in names:
        if names.count(name) > 1:
            raise ServeFlagError(
                f"{names.count(name)} models have the name {name!r}: give --served-model-name once "
                "for each model, in their order"
            )


def chosen_level(frontend_words: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Returns the level of sleep that the frontend's flags name; 0 if they name none.

    Raises:
        ServeFlagError: it is no number.
    """
    named = environ.get("OCTAVO_FRONTEND_SWAP_LEVEL", "0")
    try:
        return int(read_flags(frontend_words, "frontend", swap_level=(int, named)).swap_level)
    except ServiceFailedError as error:
        raise ServeFlagError(str(error)) from None


def fitting_level(
    wanted: int, weights_bytes: Sequence[int], report: Callable[[str], None], free_bytes: int
) -> int:
    """Returns the level of sleep for models whose weights may all be in the host's memory.

    Args:
        wanted: the level that the user named; 0 for the best one that fits.
        weights_bytes: of each model.
        report: takes a line about a choice that costs time.
        free_bytes: memory that the host can still give.

    Raises:
        ServeFlagError: the weights do not fit, as the level that was named wants.
    """
    if wanted == DROP_WEIGHTS or sum(weights_bytes) <= free_bytes:
        return wanted or KEEP_WEIGHTS
    each = " + ".join(f"{size / 2**30:.1f}" for size in weights_bytes)
    problem = (
        f"the models' weights take {each} GiB, and the host has {free_bytes / 2**30:.1f} GiB free "
        "for those that sleep"
    )
    if wanted == KEEP_WEIGHTS:
        raise ServeFlagError(f"{problem}: --swap-level 2 loads them again instead, which is slower")
    report(f"{problem}: they are loaded again at each swap (--swap-level 2)")
    return DROP_WEIGHTS


def weights_bytes_of(words: Sequence[str]) -> int:
    """Returns the size of the checkpoint that an engine's flags name; 0 of the embedded model."""
    model: Path | None = read_flags(words, "engine", model=(Path, None)).model
    if model is None:
        return 0
    files = model.glob("*.safetensors") if model.is_dir() else [model]
    return sum(file.stat().st_size for file in files if file.is_file())


async def start_in_turn(
    supervisor: Supervisor,
    engines: Sequence[Service],
    names: Sequence[str],
    *,
    level: int,
    report: Callable[[str], None],
) -> None:
    """Starts engines that share a card: each loads its model and sleeps, and the first one wakes.

    So each can measure and take the whole card. The first one was loaded when there was least else
    on the card; if it wakes, the others will.

    Raises:
        ServiceFailedError: one does not start, or cannot sleep or wake.
    """
    request = SleepRequest(level=level, mode=SleepMode.SLEEP_MODE_WAIT)
    await asyncio.gather(*map(supervisor.start, engines))
    for engine, name in zip(engines, names, strict=True):
        load = _order(engine, lambda stub: stub.Wake(WakeRequest()))
        loaded = await supervisor.wait_for(engine, load, f"loading {name}")
        sleep = _order(engine, lambda stub: stub.Sleep(request))
        slept = await supervisor.wait_for(engine, sleep, f"putting {name} to sleep")
        report(
            f"{engine.name}: {name} loaded in {loaded.took_s:.1f} s, asleep in {slept.took_s:.2f} s"
            f" ({slept.num_bytes / 2**30:.1f} GiB)"
        )
    wake = _order(engines[0], lambda stub: stub.Wake(WakeRequest()))
    woken = await supervisor.wait_for(engines[0], wake, f"waking {names[0]}")
    report(f"{engines[0].name}: {names[0]} awake in {woken.took_s:.2f} s")


async def _order(engine: Service, call: Callable[[OperatorServiceStub], Awaitable[Any]]) -> Any:
    """Gives an engine an order.

    Raises:
        ServiceFailedError: it refuses, with its reason.
    """
    try:
        async with connected(OperatorServiceStub, engine.address) as stub:
            return await call(stub)
    except OctavoError as refusal:
        raise ServiceFailedError(f"{engine.name}: {refusal}") from None
