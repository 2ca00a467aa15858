"""The flags of each service that `octavo serve` starts, checked beforehand."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from services.client.gpus import divide_gpus, engine_needs, visible_gpus
from services.client.model import engine_flags
from services.client.serve_flags import Division, ServeFlagError
from services.client.service_flags import check_arguments, served_name
from services.client.shared_card import (
    KEEP_WEIGHTS,
    SHARING_FLAGS,
    adapters_of_models,
    check_names,
    chosen_level,
    divide_among_models,
    fitting_level,
    take_adapters,
    weights_bytes_of,
)
from services.settings.host_memory import available_host_bytes


@dataclass(slots=True, kw_only=True)
class ServePlan:
    """The flags of the services.

    environments: of each engine, besides ours. engine_words, frontend_words: flags of all engines
    and of the frontend. model_words: flags of each engine alone, if they have a model each and
    share a card. names: of those models. level: of the sleep between their turns.
    """

    environments: Sequence[Mapping[str, str]]
    engine_words: list[str]
    frontend_words: list[str]
    model_words: list[list[str]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    level: int = 0
    remarks: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The part of the command line that is not a flag of a service alone.

    engine_words, frontend_words: flags that the user gives one service. num_engines: engines to
    run. listen_flags: where the frontend listens.
    """

    engine_words: Sequence[str]
    frontend_words: Sequence[str]
    num_engines: int
    listen_flags: Sequence[str]


def plan_services(division: Division, options: ServeOptions) -> ServePlan:
    """Returns the flags of all services, after fetching models of the hub.

    Raises:
        ServeFlagError, UsageError: flags do not fit.
        ServiceFailedError: there are too few GPUs.
        HubError: a model cannot be fetched.
    """
    if len(division.models) > 1:
        return _plan_shared_card(division, options)
    engine_words = [*division.engine, *options.engine_words]
    frontend_words = [*division.frontend, *options.frontend_words]
    if chosen_level(frontend_words):
        raise ServeFlagError("--swap-level is for several models: give --model for each")
    check_arguments(engine=engine_words, frontend=[*options.listen_flags, *frontend_words])
    environments = divide_gpus(options.num_engines, engine_needs(engine_words), visible_gpus())
    model = next(iter(division.models), None)
    return ServePlan(
        environments=environments,
        engine_words=[*engine_flags(model, engine_words), *engine_words],
        frontend_words=frontend_words,
    )


def _plan_shared_card(division: Division, options: ServeOptions) -> ServePlan:
    """Returns the flags for one engine of each model, on the same devices."""
    num_models = len(division.models)
    if options.num_engines > 1:
        raise ServeFlagError(
            f"--engines {options.num_engines} is for one model; {num_models} models share a card, "
            "with one engine each"
        )
    words_of_all, adapters = take_adapters(division.engine)
    common, own = divide_among_models(words_of_all, num_models)
    engine_words = [*common, *options.engine_words, *SHARING_FLAGS]
    frontend_words = [*division.frontend, *options.frontend_words]
    wanted = chosen_level(frontend_words)
    checked = [*options.listen_flags, *frontend_words, "--swap-level", str(wanted or KEEP_WEIGHTS)]
    for words in own:
        check_arguments(engine=[*engine_words, *words], frontend=checked)
        divide_gpus(1, engine_needs([*engine_words, *words]), visible_gpus())
    model_words = [
        [*engine_flags(model, [*engine_words, *words]), *words]
        for model, words in zip(division.models, own, strict=True)
    ]
    names = [served_name([*engine_words, *words]) for words in model_words]
    check_names(names)
    for words, flags in zip(model_words, adapters_of_models(adapters, names), strict=True):
        check_arguments(engine=[*engine_words, *words, *flags], frontend=checked)
        words += flags
    remarks: list[str] = []
    level = fitting_level(
        wanted,
        [weights_bytes_of(words) for words in model_words],
        remarks.append,
        available_host_bytes(),
    )
    remarks.append(f"{', '.join(names)} share the card: one is awake, sleep is of level {level}")
    return ServePlan(
        environments=[{}] * num_models,
        engine_words=engine_words,
        frontend_words=[*frontend_words, "--swap-level", str(level)],
        model_words=model_words,
        names=names,
        level=level,
        remarks=remarks,
    )
