"""Finds objects that only the garbage collector would free."""

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_off() -> Iterator[None]:
    """Lets nothing be freed but by its last reference."""
    gc.collect()
    gc.disable()
    # A process that has run many tests has millions of objects to look through. They stay frozen:
    # otherwise each later collection would look through them, those of tests/conftest.py included.
    gc.freeze()
    try:
        yield
    finally:
        gc.enable()


def num_alive(*kinds: type) -> dict[str, int]:
    """Returns how many objects of these very classes exist, by name; those without are left out.

    Objects from before `collector_off` do not count inside of it.
    """
    found = Counter(type(each) for each in gc.get_objects())
    return {kind.__name__: found[kind] for kind in kinds if found[kind]}
