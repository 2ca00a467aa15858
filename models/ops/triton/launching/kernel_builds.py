"""What Triton would build for launches, found without launching, and built where there is no GPU.

Triton keeps what it builds in a folder, by a key of all that the code depends on. What another
process has built is therefore found by the launch that wants it.
"""

import hashlib
import json
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import triton
from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia_driver
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime import JITFunction, driver
from triton.runtime.cache import get_cache_key, get_cache_manager, triton_key

from models.ops import triton as kernels
from models.ops.triton.launching.launch import forget_all_builds

_MOST_FILE_NAME = 150
"""Characters of a kernel's name that Triton names files by (triton/compiler/compiler.py)."""


class MissingKernelError(Exception):
    """A launch wants a kernel that nobody has built yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelBuild:
    """A kernel and all that its code depends on; travels between processes.

    module, name: where the kernel's function is found. signature: types of its arguments by name.
    constants, attributes: by place of the argument. options: of the compiler. target: of the GPU.
    """

    module: str
    name: str
    signature: Mapping[str, Any]
    constants: Mapping[tuple[int, ...], Any]
    attributes: Mapping[tuple[int, ...], Any]
    options: Mapping[str, Any]
    target: GPUTarget

    @property
    def source(self) -> ASTSource:
        """What Triton's compiler takes."""
        function = getattr(import_module(self.module), self.name)
        source = GluonASTSource if function.is_gluon() else ASTSource
        return source(function, self.signature, self.constants, self.attributes)

    @property
    def key(self) -> str:
        """What Triton keeps the kernel by."""
        backend = make_backend(self.target)
        options = backend.parse_options(dict(self.options))
        key = get_cache_key(self.source, backend, options, get_cache_invalidating_env_vars())
        return hashlib.sha256(key.encode()).hexdigest()

    @property
    def is_kept(self) -> bool:
        """Whether Triton finds the kernel in its cache."""
        name = f"{self.source.name[:_MOST_FILE_NAME]}.json"
        return name in (get_cache_manager(self.key).get_group(name) or {})

    @property
    def num_characters(self) -> int:
        """Length of the function's source: what takes longer to build is longer, as a rule."""
        return len(self.source.fn.src)

    def build(self) -> None:
        """Builds the kernel, and what launches it, into Triton's cache; no GPU takes part."""
        kernel = triton.compile(self.source, target=self.target, options=dict(self.options))
        if hasattr(nvidia_driver, "make_launcher"):
            # Up to Triton 3.6 each signature has a launcher in C, which takes a compiler too.
            nvidia_driver.CudaLauncher(kernel.src, kernel.metadata)


@contextmanager
def only_kept_kernels() -> Iterator[None]:
    """Lets launches run as long as their kernels are in Triton's cache.

    When one is missing, all that this process has loaded are forgotten, so that `launches_skipped`
    skips them too.

    Raises:
        MissingKernelError: at the first launch of another kernel, which is not built.
    """

    def refuse_missing(*, fn: Any, compile: dict[str, Any], **details: Any) -> bool:
        if not _build_of(fn, compile).is_kept:
            raise MissingKernelError(fn.name)
        return False

    try:
        with _asked_before_builds(refuse_missing):
            yield
    except MissingKernelError:
        for function in kernel_functions():
            function.device_caches.clear()
        forget_all_builds()
        raise


@contextmanager
def launches_skipped() -> Iterator[dict[str, KernelBuild]]:
    """Skips launches of kernels that this process has not loaded, in all threads.

    What such a kernel would have written stays as it was. Yields what would have been built or
    loaded as it comes to be known, by what tells one from the others.
    """
    builds: dict[str, KernelBuild] = {}
    with ExitStack() as stand_ins:
        stand_ins.callback(forget_all_builds)

        def skip(*, fn: Any, compile: dict[str, Any], **details: Any) -> bool:
            builds[f"{fn.module}.{fn.name} {compile['key']}"] = _build_of(fn, compile)
            # Asking takes Triton longer than launching; of the same kernel it asks once.
            kernels = fn.jit_function.device_caches[compile["device"]][0]
            kernels[compile["key"]] = _SkippedKernel()
            stand_ins.callback(kernels.pop, compile["key"])
            return True

        with _asked_before_builds(skip):
            yield builds


class _SkippedKernel:
    """Stands for a kernel in Triton's table of those that are loaded; its launches do nothing."""

    function = None
    packed_metadata = None

    def launch_metadata(self, *arguments: Any) -> None:
        """Tells nothing of a launch."""

    def run(self, *arguments: Any) -> None:
        """Launches nothing."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """Returns what launches nothing."""
        return self.run


def kernel_functions() -> Iterator[JITFunction]:
    """Yields the functions of all kernels, some of them several times, always in one order."""
    for info in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        for value in vars(import_module(info.name)).values():
            if isinstance(value, JITFunction):
                yield value


def load_kernel_functions() -> None:
    """Imports every kernel and computes what keys are made of.

    All processes that share a cache must do so before their first build: what a function adds to a
    key depends on whether those that it calls have been asked before (Triton 3.6 and 3.7,
    DependenciesFinder._update_hash). Modules hold functions behind those that they call.
    """
    for function in kernel_functions():
        _ = function.cache_key
    triton_key()


def prepare_launches() -> None:
    """Does what else a process's first launch would do first: Triton's binding to the driver."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="driver") as thread:
        binding = thread.submit(getattr, driver, "active")
        load_kernel_functions()
        binding.result()


@contextmanager
def _asked_before_builds(hook: Callable[..., bool]) -> Iterator[None]:
    """Has Triton ask whether to skip a launch of a kernel that this process has not loaded."""
    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = hook
    try:
        yield
    finally:
        knobs.runtime.jit_cache_hook = before


def _build_of(fn: Any, compile: dict[str, Any]) -> KernelBuild:  # as Triton calls them
    """Returns what Triton tells its hook of."""
    # All options are only in what Triton tells as JSON, which makes lists of tuples.
    options = json.loads(compile["specialization_data"])["options"]
    return KernelBuild(
        module=fn.module,
        name=fn.name,
        signature=compile["signature"],
        constants=compile["constants"],
        attributes=compile["configs"][0],
        options={name: _as_tuple(value) for name, value in options.items()},
        target=driver.active.get_current_target(),
    )


def _as_tuple(value: Any) -> Any:
    """Returns a list as a tuple, all the way down."""
    return tuple(_as_tuple(item) for item in value) if isinstance(value, list) else value
