"""Finds why ranks end when one of them fails and the others lose it."""

from collections.abc import Sequence

from services.engine.worker.rank_process import LostPeerError, WorkerDiedError

CAUSE_GRACE_S = 2.0
"""Time in which the end of a rank shows after another one has lost it."""


def cause_among(errors: Sequence[WorkerDiedError]) -> WorkerDiedError:
    """Returns the error that explains the others: not that a rank has lost another one."""
    return min(errors, key=lambda error: isinstance(error, LostPeerError))
