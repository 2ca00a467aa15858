"""Finds the kernels that launches need without launching, and builds them without a GPU.

Triton caches kernels in a folder, by a key of all that their code depends on, so a launch finds
what another process has built.
"""

import hashlib
import json
import pkgutil
import threading
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

from models import kernels
from models.kernels.launching.launch import forget_all_builds

_MOST_FILE_NAME = 150
"""Characters of a kernel's name in Triton's file names (triton/compiler/compiler.py)."""


class MissingKernelError(Exception):
    """A launch needs a kernel that has not been built."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelBuild:
    """A kernel and all that its code depends on; it can be sent between processes.

    module, name: of the kernel's function.
    signature: types of its arguments by name.
    constants, attributes: by index of the argument.
    options: of the compiler.
    target: the GPU.
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
        """The input of Triton's compiler."""
        function = getattr(import_module(self.module), self.name)
        source = GluonASTSource if function.is_gluon() else ASTSource
        return source(function, self.signature, self.constants, self.attributes)

    @property
    def key(self) -> str:
        """The kernel's key in Triton's cache."""
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
        """Length of the function's source, an estimate of how long it takes to build."""
        return len(self.source.fn.src)

    def build(self) -> None:
        """Builds the kernel and its launcher into Triton's cache, without a GPU."""
        kernel = triton.compile(self.source, target=self.target, options=dict(self.options))
        if hasattr(nvidia_driver, "make_launcher"):
            # Up to Triton 3.6 each signature has a launcher in C, which must be compiled too.
            nvidia_driver.CudaLauncher(kernel.src, kernel.metadata)


@contextmanager
def only_kept_kernels() -> Iterator[None]:
    """Lets launches run as long as their kernels are in Triton's cache.

    When one is missing, this process forgets all that it has loaded, so that `launches_skipped`
    skips those too.

    Raises:
        MissingKernelError: at the first launch of a kernel that is not built.
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
def launches_skipped(*, while_serving: bool = False) -> Iterator[dict[str, KernelBuild]]:
    """Skips this thread's launches of kernels that this process has not loaded.

    A skipped kernel's outputs keep their old content. Yields the skipped builds, by a key, as
    launches find them.

    Args:
        while_serving: other threads may launch kernels meanwhile. Skipping takes longer then.
    """
    builds: dict[str, KernelBuild] = {}
    thread = threading.get_ident()
    with ExitStack() as stand_ins:
        if not while_serving:
            stand_ins.callback(forget_all_builds)

        def skip(*, fn: Any, compile: dict[str, Any], **details: Any) -> bool:
            if threading.get_ident() != thread:
                return False
            name = f"{fn.module}.{fn.name} {compile['key']}"
            if name not in builds:
                builds[name] = _build_of(fn, compile)
            if while_serving:
                return True
            # The hook takes longer than a launch; with a stand-in Triton calls it once a kernel.
            kernels = fn.jit_function.device_caches[compile["device"]][0]
            kernels[compile["key"]] = _SkippedKernel()
            stand_ins.callback(kernels.pop, compile["key"])
            return True

        with _asked_before_builds(skip):
            yield builds


class _SkippedKernel:
    """Stands in for a kernel in Triton's table of loaded kernels; its launches do nothing."""

    function = None
    packed_metadata = None

    def launch_metadata(self, *arguments: Any) -> None:
        """Returns no metadata."""

    def run(self, *arguments: Any) -> None:
        """Launches nothing."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """Returns a launcher that does nothing."""
        return self.run


def kernel_functions() -> Iterator[JITFunction]:
    """Yields the functions of all kernels in a fixed order, some several times."""
    for info in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        for value in vars(import_module(info.name)).values():
            if isinstance(value, JITFunction):
                yield value


def load_kernel_functions() -> None:
    """Imports every kernel and computes the parts of cache keys.

    All processes that share a cache must do so before their first build: a function's part of a key
    depends on whether its callees' keys were computed before (Triton 3.6 and 3.7,
    DependenciesFinder._update_hash). Modules define functions after their callees.
    """
    for function in kernel_functions():
        _ = function.cache_key
    triton_key()


def prepare_launches() -> None:
    """Does the rest of a process's first launch: Triton's binding to the driver."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="driver") as thread:
        binding = thread.submit(getattr, driver, "active")
        load_kernel_functions()
        binding.result()


@contextmanager
def _asked_before_builds(hook: Callable[..., bool]) -> Iterator[None]:
    """Has Triton call `hook`, which may skip the launch, before it loads a kernel."""
    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = hook
    try:
        yield
    finally:
        knobs.runtime.jit_cache_hook = before


def _build_of(fn: Any, compile: dict[str, Any]) -> KernelBuild:  # as Triton calls them
    """Returns the build that Triton describes to its hook."""
    # Only the JSON has all options, and JSON makes lists of tuples.
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
    return tuple(_as_tuple(item) for item in value) if isinstance(value, list) else value
