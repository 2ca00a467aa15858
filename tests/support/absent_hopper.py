"""Pretends on a CPU that there is a GPU, a Hopper one by default, to see what a model launches.

Call `pretend` before importing models, in a program of its own.
"""

from collections import defaultdict
from collections.abc import Iterable
from itertools import combinations
from pathlib import Path

import torch
from triton._C.libtriton import ir
from triton.compiler import make_backend
from triton.compiler.errors import CompilationError
from triton.runtime.cache import get_cache_manager

from models.kernels import gpu
from tests.support.gpu_facts import CARDS, properties_of

CPU = torch.device("cpu")
_FREE_OF_ERRORS = "free_of_errors"


def pretend(card: str = "H200") -> None:
    """Chooses kernels on a CPU as on a card of `CARDS`."""
    gpu.has_kernels = lambda device: True
    torch.cuda.get_device_properties = lambda device=None: properties_of(card)
    from models.kernels.launching import dependent_launch

    if CARDS[card].capability >= gpu.HOPPER:
        dependent_launch.launch_options = lambda device: {"DEPENDENT": True, "launch_pdl": True}
    torch.set_num_threads(1)
    # A skipped kernel leaves nonsense in its output wherever no other code zeroes it.
    torch.use_deterministic_algorithms(mode=True)


def launched_by(
    folder: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    num_drafts: int = 0,
    keep_quantized: bool | None = None,
    num_ranks: int = 1,
    data_parallel_size: int = 1,
    max_model_len: int = 128,
):
    """Returns the kernels that a worker launches for a checkpoint, before it is ready and later.

    num_ranks: that share whole experts; the first one's kernels. data_parallel_size: of these ranks
    where each has tokens of its own.
    """
    from models.batch_invariance import is_batch_invariant
    from models.cudagraph_mode import CUDAGraphMode
    from models.loading.loader import load_model
    from models.parallel.collectives import without_other_ranks
    from models.parallel.group import ParallelGroup
    from services.engine.kv_cache.cache_groups import group_layers
    from services.engine.limits import StepLimits
    from services.engine.worker.start.graph_setup import warm_up_first_graphs
    from services.engine.worker.start.kernel_building import found_in
    from services.engine.worker.start.kv_memory import probe_runner
    from services.engine.worker.start.warm_up import (
        all_steps,
        gates_of,
        largest_step,
        run_small_steps,
    )
    from tests.support.compilation import compilation_config

    model = load_model(
        folder,
        device=CPU,
        dtype=dtype,
        load_format="dummy",
        keep_quantized=keep_quantized,
        with_draft_layers=num_drafts > 0,
        group=ParallelGroup(
            size=num_ranks,
            enable_expert_parallel=num_ranks > 1,
            data_parallel_size=data_parallel_size,
        ),
    )
    windows = model.config.entry_windows(with_draft_layers=num_drafts > 0)
    limits = StepLimits(
        max_num_seqs=256,
        max_num_batched_tokens=1024,
        max_model_len=max_model_len,
        block_size=16,
        vocab_size=model.config.vocab_size,
        layer_groups=group_layers(
            windows, max_model_len=max_model_len, spans=model.config.cache_spans
        ),
        num_speculative_tokens=num_drafts,
        data_parallel_size=data_parallel_size,
        shared_prefix_tokens=0 if num_drafts or is_batch_invariant() else 512,
    )
    runner = probe_runner(model, limits=limits, dtype=cache_dtype or dtype, device=CPU)
    config = compilation_config(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE)
    with without_other_ranks():
        return found_in(
            [
                lambda: runner.execute(largest_step(limits)),
                lambda: warm_up_first_graphs(runner, config, limits=limits),
                lambda: run_small_steps(
                    runner, limits, all_steps(model.config, limits, gates_of(model))
                ),
            ]
        )


def check_types(builds: Iterable) -> list[str]:
    """Runs Triton's front end over builds of each kernel that have all its traits.

    It passes over kernels that Triton's cache notes as free of errors, by all that they depend on.

    Returns:
        The errors of the front end.
    """
    errors = []
    for build in _varied(builds):
        kept = get_cache_manager(build.key)
        if kept.has_file(_FREE_OF_ERRORS):
            continue
        backend = make_backend(build.target)
        options = backend.parse_options(dict(build.options))
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        functions = backend.get_codegen_implementation(options)
        try:
            build.source.make_ir(
                build.target, options, functions, backend.get_module_map(), context
            )
        except CompilationError as error:
            errors.append(f"{build.name} {dict(build.signature)} {dict(build.constants)}: {error}")
        else:
            kept.put("", _FREE_OF_ERRORS, binary=False)
    return errors


def _varied(builds: Iterable) -> list:
    """Returns builds of each kernel that together have all traits that occur."""
    of_kernels = defaultdict(list)
    for build in builds:
        of_kernels[build.module, build.name].append((_traits(build), build))
    chosen = []
    for each in of_kernels.values():
        missing = set().union(*(traits for traits, _ in each))
        while missing:
            traits, build = max(each, key=lambda pair: len(pair[0] & missing))
            missing -= traits
            chosen.append(build)
    return chosen


def _traits(build) -> set:
    """Returns each size of a build, and every two of its types and flags, which choose branches."""
    choices, sizes = [], {("num_warps", build.options.get("num_warps"))}
    for name, of_type in build.signature.items():
        if of_type != "constexpr":
            choices.append((name, str(of_type)))
    for index, value in _values(build):
        is_choice = value is None or isinstance(value, bool)
        (choices.append if is_choice else sizes.add)((index, repr(value)))
    return sizes | set(combinations(choices, 2))


def _values(build) -> list:
    """Returns the constants of a build by place, with each value of a form."""
    values = []
    for index, value in build.constants.items():
        fields = value._asdict() if hasattr(value, "_asdict") else {None: value}
        values += [((index, name), each) for name, each in fields.items()]
    return values
