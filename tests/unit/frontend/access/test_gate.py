"""Keys open the gate while they are in the file."""

import asyncio
import os
from pathlib import Path

import pytest
import structlog

from services.frontend.access.gate import Gate
from services.frontend.access.key_file import MAX_FILE_BYTES
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


def test_a_key_has_a_name(path):
    gate = Gate(path)
    assert gate.authenticate(f"Bearer {ALICE}").name == "alice"
    assert gate.authenticate(f"bearer  {BOB} ").name == "bob"


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [""],
        ["Bearer"],
        ["Bearer "],
        [f"Basic {ALICE}"],
        [ALICE],
        [f"Bearer {ALICE}x"],
        [f"Bearer {ALICE[:-1]}"],
        ["Bearer " + "x" * 1000],
        ["Bearer \u00e9\ud800"],
        [f"Bearer {ALICE}", f"Bearer {BOB}"],
    ],
)
def test_anything_else_is_refused_without_being_repeated(path, headers):
    with pytest.raises(UnauthenticatedError) as refused:
        Gate(path).authenticate(*headers)
    assert ALICE[:-1] not in str(refused.value)


async def test_what_is_begun_belongs_to_its_caller_also_in_tasks(path):
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


async def test_engines_are_listed_for_keys_that_may_see_them_as_long_as_they_may(path):
    path.write_text(f'[keys.alice]\nkey = "{ALICE}"\nmay_list_engines = true\n')
    gate = Gate(path)
    with gate.acting_as(gate.authenticate(f"Bearer {ALICE}")):
        gate.check_may_list_engines()
        write(path, alice=ALICE)
        await gate.refresh(path)
        with pytest.raises(NotPermittedError):
            gate.check_may_list_engines()
    with pytest.raises(NotPermittedError):
        gate.check_may_list_engines()


def test_without_a_file_all_callers_may_begin_and_list_engines():
    gate = Gate()
    assert not gate.requires_keys
    gate.begin().charge_prompt(10**9)
    gate.check_may_list_engines()


async def test_a_changed_file_counts_and_debts_stay(path):
    gate = Gate(path)
    path.write_text(f'[keys.alice]\nkey = "{ALICE}"\ntokens_per_minute = 60\n')
    await gate.refresh(path)
    alice = gate.authenticate(f"Bearer {ALICE}")
    alice.begin().charge_output(1000)
    path.write_text(f'[keys.alicia]\nkey = "{ALICE}"\ntokens_per_minute = 61\n')
    await gate.refresh(path)
    assert gate.authenticate(f"Bearer {ALICE}") is alice
    assert alice.name == "alicia"
    with pytest.raises(OverloadedError, match="61 tokens"):
        alice.begin()
    with pytest.raises(UnauthenticatedError, match="not known"):
        gate.authenticate(f"Bearer {BOB}")


@pytest.mark.parametrize(
    "fault", ["gone", "empty", "broken", "fifo", "folder", "device", "loop", "huge"]
)
async def test_a_file_that_turns_bad_locks_no_caller_out(path, fault):
    gate = Gate(path)
    content = {"empty": "", "broken": "[keys", "huge": "#" * (MAX_FILE_BYTES + 1)}
    path.unlink()
    match fault:
        case "fifo":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "device":
            path.symlink_to("/dev/zero")
        case "loop":
            path.symlink_to(path)
        case "gone":
            pass
        case _:
            path.write_text(content[fault])
    with structlog.testing.capture_logs() as lines:
        await gate.refresh(path)
        await gate.refresh(path)
    assert [line["event"] for line in lines] == ["api_keys_not_reloaded"]
    gate.authenticate(f"Bearer {ALICE}").begin()
    path.rmdir() if fault == "folder" else path.unlink(missing_ok=True)
    write(path, carol="carol-0123456789")
    await gate.refresh(path)
    assert gate.authenticate("Bearer carol-0123456789").name == "carol"


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        (0o600, ""),
        (0o640, ""),
        (0o644, "every user may read it"),
        (0o666, "every user may read it and every user may write it"),
        (0o660, "its group may write it"),
    ],
)
def test_a_file_that_others_may_use_is_warned_about(path, mode, reason):
    path.chmod(mode)
    with structlog.testing.capture_logs() as lines:
        Gate(path)
    found = [line["reason"] for line in lines if line["event"] == "secret_file_exposed"]
    assert [text.partition(" (permissions")[0] for text in found] == ([reason] if reason else [])
