"""Tells when Triton builds a kernel."""

from collections.abc import Callable

from triton import knobs


def on_build(listener: Callable[[str], None]) -> None:
    """Calls `listener` with a kernel's name whenever one is built, or loaded from Triton's cache.

    There is one listener: another one takes its place.
    """

    def hook(*, fn, **details):
        listener(fn.name)

    knobs.runtime.jit_post_compile_hook = hook
