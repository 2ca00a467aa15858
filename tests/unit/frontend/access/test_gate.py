"""Keys open the gate while they are in the file."""

import asyncio
from pathlib import Path

import pytest
import structlog

from services.frontend.access.gate import Gate
from services.frontend.errors import NotPermittedError, OverloadedError, UnauthenticatedError

ALICE, BOB = "alice-0123456789", "bob-0123456789ab"


def write(path: Path, **keys: str) -> Path:
    fresh = path.with_suffix(".new")
    fresh.write_text(
        "".join(f'[keys.{name}]\nkey = "{key}"\n' for name, key in keys.items()) + "# "
    )
    fresh.replace(path)
    return path


@pytest.fixture
def path(tmp_path) -> Path:
    return write(tmp_path / "keys.toml", alice=ALICE, bob=BOB)


def test_a_key_tells_its_name(path):
    gate = Gate(path)
    assert gate.authenticate(f"Bearer {ALICE}").name == "alice"
    assert gate.authenticate(f"bearer  {BOB} ").name == "bob"


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        f"Basic {ALICE}",
        ALICE,
        f"Bearer {ALICE}x",
        f"Bearer {ALICE[:-1]}",
        "Bearer " + "x" * 1000,
        "Bearer \u00e9\ud800",
    ],
)
def test_anything_else_is_refused_without_being_repeated(path, header):
    with pytest.raises(UnauthenticatedError) as refused:
        Gate(path).authenticate(header)
    assert ALICE[:-1] not in str(refused.value)


async def test_what_is_begun_belongs_to_whoever_acts_also_in_tasks(path):
    gate = Gate(path)
    alice = gate.authenticate(f"Bearer {ALICE}")

    async def begin() -> dict[str, object]:
        gate.begin()
        return structlog.contextvars.get_contextvars()

    with gate.acting_as(alice):
        bound = await asyncio.create_task(begin())
    assert bound == {"caller": "alice"}
    with pytest.raises(UnauthenticatedError):
        gate.begin()


def test_engines_are_listed_for_keys_that_may_see_them_as_long_as_they_may(path):
    path.write_text(f'[keys.alice]\nkey = "{ALICE}"\nmay_list_engines = true\n')
    gate = Gate(path)
    with gate.acting_as(gate.authenticate(f"Bearer {ALICE}")):
        gate.check_may_list_engines()
        write(path, alice=ALICE)
        gate.refresh(path)
        with pytest.raises(NotPermittedError):
            gate.check_may_list_engines()
    with pytest.raises(NotPermittedError):
        gate.check_may_list_engines()


def test_without_a_file_everybody_may_begin_and_list_engines():
    gate = Gate()
    assert not gate.requires_keys
    gate.begin().charge_prompt(10**9)
    gate.check_may_list_engines()


def test_a_changed_file_counts_and_debts_stay(path):
    gate = Gate(path)
    path.write_text(f'[keys.alice]\nkey = "{ALICE}"\ntokens_per_minute = 60\n')
    gate.refresh(path)
    alice = gate.authenticate(f"Bearer {ALICE}")
    alice.begin().charge_output(1000)
    path.write_text(f'[keys.alicia]\nkey = "{ALICE}"\ntokens_per_minute = 61\n')
    gate.refresh(path)
    assert gate.authenticate(f"Bearer {ALICE}") is alice
    assert alice.name == "alicia"
    with pytest.raises(OverloadedError, match="61 tokens"):
        alice.begin()
    with pytest.raises(UnauthenticatedError, match="not known"):
        gate.authenticate(f"Bearer {BOB}")


@pytest.mark.parametrize("fault", ["gone", "empty", "broken"])
def test_a_file_that_turns_bad_locks_nobody_out(path, fault):
    gate = Gate(path)
    if fault == "gone":
        path.unlink()
    else:
        path.write_text("" if fault == "empty" else "[keys")
    with structlog.testing.capture_logs() as lines:
        gate.refresh(path)
        gate.refresh(path)
    assert [line["event"] for line in lines] == ["api_keys_not_reloaded"]
    gate.authenticate(f"Bearer {ALICE}").begin()
    write(path, carol="carol-0123456789")
    gate.refresh(path)
    assert gate.authenticate("Bearer carol-0123456789").name == "carol"
