"""Reports when Triton builds a kernel."""

from collections.abc import Callable

from triton import knobs


def on_build(listener: Callable[[str], None]) -> None:
    """Calls `listener` with a kernel's name whenever one is built, or loaded from Triton's cache.

    A new listener replaces the last one.
    """

    def hook(*, fn, **details):
        listener(fn.name)

    knobs.runtime.jit_post_compile_hook = hook
