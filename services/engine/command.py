"""Chooses what a command line of the engine asks for, reads its flags and runs it."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import uvloop

from services.engine.capture_sizes.choice import with_planned_sizes
from services.engine.checkpoint.draft_folder import check_draft_folder
from services.engine.checkpoint.fitting_requests import with_fitting_requests
from services.engine.checkpoint.hub_model import with_local_model
from services.engine.checkpoint.model_files import ModelFolderError
from services.engine.checkpoint.model_folder import ModelFolder
from services.engine.config.engine_config import EngineConfig
from services.engine.config.flags import VARIABLE_PREFIX, read_command_line
from services.hub.names import HubError
from services.processes.grpc_variables import set_grpc_variables
from services.processes.private_folder import ExposedFolderError, temporary_folder
from services.processes.standard_output import checked_output
from services.processes.terminal_text import terminal_text
from services.settings.flags import UsageError
from services.settings.variables import warn_of_unknown_variables
from services.telemetry.logging import configure_logging

DIFFERENT = 1
USAGE_ERROR = 2

_Config = TypeVar("_Config", bound=EngineConfig)
_Command = Callable[[Sequence[str]], int]


def run(words: Sequence[str]) -> int:
    """Runs what the words ask for and returns the process's exit status."""
    program, command, arguments = _choose(words)
    try:
        return command(arguments)
    except (UsageError, HubError, ModelFolderError) as error:
        for line in str(error).splitlines():
            print(f"{program}: {terminal_text(line)}", file=sys.stderr)  # noqa: T201  for the operator
        return USAGE_ERROR


def _choose(arguments: Sequence[str]) -> tuple[str, _Command, Sequence[str]]:
    """Returns the name of the chosen command, its function, and its arguments."""
    match arguments:
        case ["cache", "explain", *rest]:
            return "octavo cache explain", _explain_cache, rest
        case ["replay", *rest]:
            return "octavo replay", _replay, rest
        case ["graphs", "plan", *rest]:
            return "octavo graphs plan", _plan_graphs, rest
        case ["worker-node", *rest]:
            return "octavo worker-node", _run_node, rest
    return "octavo engine", _serve, arguments


def _serve(arguments: Sequence[str]) -> int:
    config = read_command_line(EngineConfig, arguments)
    configure_logging(
        service="engine",
        level=config.observability.log_level,
        log_format=config.observability.log_format,
        error_messages=False,
    )
    warn_of_unknown_variables(VARIABLE_PREFIX, config.flags())
    config = with_local_model(config)
    config, model = _open_model(config)
    if model.image_input is None:
        config = config.with_flags(language_model_only=True)
    config = with_planned_sizes(config)
    set_grpc_variables()
    from services.engine.patch_memory import PatchMemory
    from services.engine.server import serve
    from services.engine.worker.executor import WorkerExecutor
    from services.engine.worker.remote_ranks import JoinedNodes

    num_nodes = config.parallel.num_nodes
    nodes = JoinedNodes(num_nodes) if num_nodes > 1 else None
    patches = None
    if model.image_input is not None and nodes is None:
        patches = PatchMemory.create(model.image_input.max_bytes)

    def make_executor() -> WorkerExecutor:
        return WorkerExecutor(config, nodes, patches)

    return uvloop.run(serve(config, model, make_executor, nodes, patches))


@checked_output("octavo cache explain")
def _explain_cache(arguments: Sequence[str]) -> int:
    config = read_command_line(EngineConfig, arguments)
    configure_logging(service="cache", level="warning", log_format=config.observability.log_format)
    config = with_local_model(config, has_weights=False)
    config, model = _open_model(config)
    from services.engine.compilation.cache.cache_key import compute_factors, trace_factors
    from services.engine.compilation.cache.explain import explain
    from services.engine.worker.start.device import choose_device
    from services.engine.worker.start.model_trace import traced_config

    try:
        device = choose_device(config.worker, 0)
    except ValueError as error:
        raise UsageError(str(error)) from error
    folder = config.compilation.code_dir
    traced = traced_config(config, model.config)
    factors = [of(config, traced, device) for of in (compute_factors, trace_factors)]
    print(explain(folder, *factors))  # noqa: T201  a tool's answer
    return 0


@checked_output("octavo replay")
def _replay(arguments: Sequence[str]) -> int:
    from services.engine.replay.config import ReplayConfig

    config = read_command_line(ReplayConfig, arguments)
    configure_logging(
        service="replay",
        level=config.observability.log_level,
        log_format=config.observability.log_format,
    )
    config = with_local_model(config)
    config, _ = _open_model(config)
    from services.engine.replay.command import replay
    from services.engine.replay.recording import ReplayError
    from services.engine.worker.environment import code_variables, mps_variable

    try:
        with temporary_folder() as temporary:
            os.environ.update(code_variables(config, Path(temporary)))
            os.environ.update(mps_variable(Path(temporary)))
            totals = replay(config, print)
    except (ExposedFolderError, ReplayError) as error:
        raise UsageError(str(error)) from error
    return 0 if totals.is_clean else DIFFERENT


@checked_output("octavo graphs plan")
def _plan_graphs(arguments: Sequence[str]) -> int:
    from services.engine.capture_sizes.command import plan_graphs

    return plan_graphs(list(arguments))


def _run_node(arguments: Sequence[str]) -> int:
    set_grpc_variables()
    from services.engine.node.command import run_node

    return run_node(list(arguments))


def _open_model(config: _Config) -> tuple[_Config, ModelFolder]:
    model = ModelFolder.open(
        config.checkpoint.model,
        name=config.checkpoint.model_name,
        max_model_len=config.checkpoint.max_model_len,
        num_layer_drafts=config.speculation.num_layer_drafts,
        model_impl=config.checkpoint.model_impl,
        max_image_tokens=config.images.max_image_tokens,
        task=config.checkpoint.task,
        score_tokens=config.checkpoint.score_tokens,
    )
    if config.speculation.draft_model is not None:
        if model.config.transformers is not None:
            raise ModelFolderError(
                f"--draft-model does not work with {model.architecture}, which runs as modules of "
                "transformers"
            )
        check_draft_folder(config.speculation.draft_model, model, config.checkpoint.model)
    return with_fitting_requests(config, model.config), model
