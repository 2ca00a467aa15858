"""Adapters under the numbers that callers give them, beside changes by other protocols."""

import asyncio

import pytest

from protos.openengine.v1.openengine_pb2 import LoadLoraRequest, LoraAdapter
from services.engine.adapter import Adapter
from services.engine.errors import DuplicateRequestError
from services.engine.openengine.loras import Loras


class Known:
    """Adapters that are read as soon as `may_read` allows it."""

    def __init__(self):
        self.known = {}
        self.may_read = asyncio.Event()

    @property
    def all(self):
        return list(self.known.values())

    async def load(self, name, path):
        await self.may_read.wait()
        self.known[name] = Adapter(name=name, path=path, digest=b"d" * 32, rank=8, num_bytes=1)


def request(number, name):
    adapter = LoraAdapter(lora_id=number, lora_name=name, source_path=f"/adapters/{name}")
    return LoadLoraRequest(adapter=adapter)


async def test_two_adapters_that_are_loaded_together_have_two_numbers():
    adapters = Known()
    loras = Loras(adapters)
    first = asyncio.create_task(loras.load(request(5, "a")))
    second = asyncio.create_task(loras.load(request(5, "b")))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    adapters.may_read.set()
    await first
    with pytest.raises(DuplicateRequestError, match="lora_id 5"):
        await second
    await loras.load(request(6, "b"))
    assert [each.lora_id for each in loras.list().adapters] == [5, 6]


async def test_numbers_of_adapters_that_others_removed_are_forgotten():
    adapters = Known()
    adapters.may_read.set()
    loras = Loras(adapters)
    for number in range(1, 20):
        await loras.load(request(number, f"a{number}"))
        adapters.known.clear()
    assert len(loras._given) == 1
