"""Launches a kernel without Triton's lookup of the build that fits the arguments.

Triton binds, classifies and hashes all arguments at every launch, constants too, which takes longer
than the launch itself. The build depends only on types, alignments and scalar values.
"""

import inspect
from typing import Any, TypeAlias
from weakref import WeakSet

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

MAX_BUILDS = 4096
"""Most remembered argument combinations; token counts make many of the same build."""

Argument: TypeAlias = torch.Tensor | TensorDescriptor | GluonDescriptor | float | None


class Launch:
    """A kernel with its constants, on one device; call it with a grid and the other arguments."""

    def __init__(self, kernel: Any, **constants: Any) -> None:
        """Takes all the kernel's constants, its last parameters, and options such as num_warps."""
        names = list(inspect.signature(kernel.fn).parameters)
        self._kernel = kernel
        self._constants = constants
        self._values = tuple(constants[name] for name in names if name in constants)
        num_others = len(names) - len(self._values)
        assert not constants.keys() & set(names[:num_others]), "constants come last"
        self._builds: dict[tuple[Any, ...], Any] = {}
        _launches.add(self)

    def __call__(
        self,
        grid: tuple[int, int, int],
        *args: Argument | tuple[Argument, ...],
    ) -> None:
        """Launches the kernel; args are all parameters but constants, in order.

        None leaves a parameter out of the build. A tuple with names is one parameter.
        """
        key = _kinds_of(args)
        build = self._builds.get(key)
        if build is not None:
            build[grid](*args, *self._values)
            return
        build = self._kernel[grid](*args, **self._constants)
        # Triton's interpreter builds nothing.
        if build is not None:
            if len(self._builds) >= MAX_BUILDS:
                self._builds.clear()
            self._builds[key] = build

    @property
    def is_built(self) -> bool:
        """Whether it has launched; needless launches before that build what later ones need."""
        return bool(self._builds)

    def forget_builds(self) -> None:
        """Makes Triton look up this kernel's builds again."""
        self._builds.clear()


def _kinds_of(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns what a build depends on, of each argument."""
    kinds = [
        (arg.dtype, arg.data_ptr() % 16)
        if isinstance(arg, torch.Tensor)
        else arg
        if arg is None or isinstance(arg, (int, float))
        else _kinds_of(arg)
        if isinstance(arg, tuple)
        else (arg.base.dtype, *arg.block_shape)
        for arg in args
    ]
    return tuple(kinds)


_launches: WeakSet[Launch] = WeakSet()


def forget_all_builds() -> None:
    """Makes Triton look up every kernel's builds again."""
    for launch in list(_launches):
        launch.forget_builds()
