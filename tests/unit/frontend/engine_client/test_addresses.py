"""Configured addresses and the engines they stand for."""

import pytest

from services.frontend.engine_client.addresses import AddressBook, EngineAddress


class Names:
    """A name service that a test changes."""

    def __init__(self, **known: list[str]) -> None:
        self.known = known

    async def __call__(self, host: str) -> list[str]:
        if host not in self.known:
            raise OSError("unknown name")
        return self.known[host]


@pytest.mark.parametrize(
    "target", ["10.0.0.1:50051", "[::1]:50051", "localhost:50051", "unix:/run/octavo", "dns:///a:1"]
)
async def test_an_address_that_is_no_plain_name_is_one_engine_unchanged(target):
    book = AddressBook([target], lookup=Names())
    await book.refresh()
    assert book.addresses == [EngineAddress(target)]
    assert book.problem == ""


async def test_a_name_is_as_many_engines_as_it_has_addresses():
    book = AddressBook(["engine:50051"], lookup=Names(engine=["10.0.0.2", "10.0.0.1", "fd00::1"]))
    assert book.addresses == []
    await book.refresh()
    targets = ["10.0.0.1:50051", "10.0.0.2:50051", "[fd00::1]:50051"]
    assert book.addresses == [EngineAddress(target, "engine:50051") for target in targets]


async def test_engines_that_are_named_twice_count_once():
    book = AddressBook(["10.0.0.1:1", "a:1", "10.0.0.1:1"], lookup=Names(a=["10.0.0.1"]))
    await book.refresh()
    assert [address.target for address in book.addresses] == ["10.0.0.1:1"]


async def test_names_are_followed():
    names = Names(engine=["10.0.0.1"])
    book = AddressBook(["engine:1"], lookup=names)
    await book.refresh()
    names.known["engine"] = ["10.0.0.2"]
    await book.refresh()
    assert [address.target for address in book.addresses] == ["10.0.0.2:1"]


async def test_a_name_that_cannot_be_resolved_any_more_keeps_its_engines():
    names = Names(engine=["10.0.0.1"])
    book = AddressBook(["engine:1"], lookup=names)
    await book.refresh()
    del names.known["engine"]
    await book.refresh()
    assert [address.target for address in book.addresses] == ["10.0.0.1:1"]
    assert "engine cannot be resolved: unknown name" in book.problem


async def test_the_systems_resolver_is_asked_by_default():
    book = AddressBook(["name.invalid:1"])
    await book.refresh()
    assert "name.invalid cannot be resolved" in book.problem
