"""The adapters of an engine, as one session reports them to its frontend."""

from protos.engine.v1.engine_pb2 import KnownAdapter, KnownAdapters
from services.engine.core.engine_core import EngineCore


class AdapterReport:
    """Reports all adapters whenever they, or the ones in slots of the device, have changed."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._reported: tuple[int, frozenset[bytes]] = (0, frozenset())

    def changes(self) -> KnownAdapters | None:
        """Returns all adapters; None if nothing has changed since the last call."""
        resident = self._core.resident_adapters
        state = self._core.adapters.version, resident
        if state == self._reported:
            return None
        self._reported = state
        return KnownAdapters(
            num_changes=self._core.adapters.version,
            adapters=[
                KnownAdapter(
                    name=each.name, digest=each.digest, is_resident=each.digest in resident
                )
                for each in self._core.adapters.all
            ],
        )
