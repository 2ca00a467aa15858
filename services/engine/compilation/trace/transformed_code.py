"""Writes the code that Dynamo makes of a traced forward pass, as Python, for a person to read."""

import dis
import io
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType

import structlog
from torch._dynamo.convert_frame import register_bytecode_hook

from services.engine.compilation.program.debug_dump import DebugDump

log = structlog.get_logger()

FILE_NAME = "transformed_code.py"
BYTECODE_NAME = "transformed_bytecode.txt"


@contextmanager
def dumping_transformed_code(dump: DebugDump | None) -> Iterator[None]:
    """Writes what Dynamo makes of the functions that it transforms during the block.

    Args:
        dump: gets FILE_NAME and BYTECODE_NAME; None writes nothing.
    """
    if dump is None:
        yield
        return
    sources: list[str] = []
    listings: list[str] = []

    def take(code: CodeType, new_code: CodeType) -> CodeType | None:
        sources.append(_decompiled(code, new_code))
        listings.append(_listing(new_code))
        return None  # Dynamo keeps its own

    hook = register_bytecode_hook(take)
    try:
        yield
    finally:
        hook.remove()
        dump.write(FILE_NAME, "\n\n".join(sources))
        dump.write(BYTECODE_NAME, "\n\n".join(listings))


def _decompiled(original: CodeType, transformed: CodeType) -> str:
    """Returns the Python of a code object, or a note that it is not known."""
    origin = f"# {original.co_qualname}, {original.co_filename}:{original.co_firstlineno}\n"
    try:
        # Only dumps need it; octavo[debug] brings it.
        from depyf import decompile

        return origin + str(decompile(transformed))
    except ImportError:
        return f"{origin}# octavo[debug] is not installed; see {BYTECODE_NAME}\n"
    except Exception as error:  # noqa: BLE001  a decompiler's fault must not end the trace
        log.warning("code_not_decompiled", name=original.co_qualname, error=repr(error))
        return f"{origin}# it could not be decompiled: {error!r}; see {BYTECODE_NAME}\n"


def _listing(code: CodeType) -> str:
    text = io.StringIO()
    dis.dis(code, file=text)
    return f"# {code.co_qualname}\n{text.getvalue()}"
