"""OpenEngine's calls that load, unload and list adapters."""

import os
from pathlib import Path

from protos.openengine.v1.openengine_pb2 import (
    ListLorasResponse,
    LoadLoraRequest,
    LoadLoraResponse,
    LoraAdapter,
    UnloadLoraResponse,
)
from services.engine.adapter import Adapter
from services.engine.core.adapters import Adapters
from services.engine.errors import DuplicateRequestError, InvalidRequestError, UnknownModelError

_ID_BYTES = 7
"""Bits of a digest: the number is positive and as good as unique."""


class Loras:
    """The engine's adapters under the numbers that callers of this protocol give them."""

    def __init__(self, adapters: Adapters) -> None:
        self._adapters = adapters
        self._given: dict[str, LoraAdapter] = {}
        """Adapters that were loaded with this protocol, by name."""
        self._loading: set[int] = set()
        """Numbers of adapters that are being loaded."""

    async def load(self, request: LoadLoraRequest) -> LoadLoraResponse:
        """Loads an adapter; the same one again changes nothing.

        Raises:
            InvalidRequestError: the number, the name or the path is malformed, or something is
                wrong with the adapter.
            DuplicateRequestError: another adapter has the number or the name.
            NotPermittedError, EngineUnavailableError: see `Adapters.load`.
        """
        wanted = request.adapter
        if wanted.lora_id < 1:
            raise InvalidRequestError(f"lora_id is {wanted.lora_id}; it must be positive")
        if not Path(wanted.source_path).is_absolute():
            raise InvalidRequestError("source_path must be an absolute path")
        for adapter in self._adapters.all:
            known = self._message(adapter)
            if known == wanted:
                return LoadLoraResponse(adapter=known, already_loaded=True)
            if known.lora_id == wanted.lora_id:
                raise _taken(wanted)
        if wanted.lora_id in self._loading:
            raise _taken(wanted)
        self._loading.add(wanted.lora_id)
        try:
            await self._adapters.load(wanted.lora_name, wanted.source_path)
        finally:
            self._loading.discard(wanted.lora_id)
        # Others may have left by another protocol.
        given = {**self._given, wanted.lora_name: wanted}
        self._given = {
            each.name: given[each.name] for each in self._adapters.all if each.name in given
        }
        return LoadLoraResponse(adapter=wanted)

    def unload(self, name: str) -> UnloadLoraResponse:
        """Forgets an adapter; its requests go on.

        Raises:
            UnknownModelError: there is none of this name.
            NotPermittedError: the operator allows no changes.
        """
        adapter = self._adapters.find(name)
        if adapter is None:
            raise UnknownModelError(f"there is no adapter {name[:128]!r}")
        message = self._message(adapter)
        self._adapters.remove(name)
        self._given.pop(name, None)
        return UnloadLoraResponse(adapter=message)

    def list(self) -> ListLorasResponse:
        """Returns all adapters, by name."""
        return ListLorasResponse(adapters=map(self._message, self._adapters.all))

    def _message(self, adapter: Adapter) -> LoraAdapter:
        """Returns an adapter as it was given; of one that came otherwise, its digest's number."""
        given = self._given.get(adapter.name)
        if given is not None and os.path.realpath(given.source_path) == adapter.path:
            return given
        number = int.from_bytes(adapter.digest[:_ID_BYTES], "little") or 1
        return LoraAdapter(lora_id=number, lora_name=adapter.name, source_path=adapter.path)


def _taken(adapter: LoraAdapter) -> DuplicateRequestError:
    return DuplicateRequestError(f"lora_id {adapter.lora_id} is another adapter's")
