"""Lets Triton's interpreter run the PTX of models.kernels.ranks.words.

Ranks are processes that share memory; a clock cycle is a nanosecond.
"""

import time

import numpy as np
import triton.language as tl
from triton._C.libtriton import interpreter as memory
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_WORD_BYTES = 4


def interpret_words() -> None:
    """Replaces the interpreter's refusal of inline assembly."""
    InterpreterBuilder.create_inline_asm = _create_inline_asm


class _Results:
    """The results of an instruction, as the interpreter's front end asks for them."""

    def __init__(self, results) -> None:
        self._results = results

    def get_result(self, index) -> TensorHandle:
        return TensorHandle(self._results[index].astype(np.int32), tl.int32)


def _create_inline_asm(self, asm, constraints, values, types, is_pure, pack) -> _Results:
    values = [value.data for value in values]
    for instruction, run in _INSTRUCTIONS.items():
        if instruction in asm:
            return _Results(run(*values))
    raise NotImplementedError(asm)


def _load(address, is_wanted):
    mask = is_wanted != 0
    nothing = np.zeros(address.shape, np.int32)
    return [
        memory.load(
            address.astype(np.uint64) + _WORD_BYTES * word, mask, nothing, np.dtype(np.int32)
        )
        for word in range(4)
    ]


def _store(address, *words_and_mask):
    *words, is_wanted = words_and_mask
    for number, word in enumerate(words):
        at = address.astype(np.uint64) + _WORD_BYTES * number
        memory.store(at, np.ascontiguousarray(word, np.int32), is_wanted != 0)
    return [np.zeros(address.shape)]


def _wait(address, is_wanted, max_cycles):
    until_ns = time.monotonic_ns() + int(max_cycles.max())
    while True:
        words = _load(address, is_wanted)
        is_missing = (is_wanted != 0) & np.any([word == 0 for word in words], 0)
        if not is_missing.any() or time.monotonic_ns() > until_ns:
            return [*words, is_missing]
        time.sleep(0.001)


_INSTRUCTIONS = {
    "ld.relaxed.sys.global.v4": _wait,
    "ld.global.v4": _load,
    "st.relaxed.sys.global.v4": _store,
    "st.global.v4": _store,
    "st.global.v2": _store,
}
