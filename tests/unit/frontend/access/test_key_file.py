"""The file of API keys is read whole or refused, and never shown."""

import hashlib

import pytest

from services.frontend.access.key_file import KeyFileError, Limits, digest_of, read_key_file

SECRET = "sk-0123456789abcdef"


def read(tmp_path, text: str):
    path = tmp_path / "keys.toml"
    path.write_text(text)
    return read_key_file(path)


def test_keys_come_plain_or_hashed_with_limits_of_their_own(tmp_path):
    hashed = hashlib.sha256(b"another secret").hexdigest()
    plain, other = read(
        tmp_path,
        f'[keys.alice]\nkey = "{SECRET}"\ntokens_per_minute = 60\n'
        f'[keys.bob]\nsha256 = "{hashed.upper()}"\nmax_live_requests = 2\n',
    )
    assert (plain.name, plain.digest) == ("alice", digest_of(SECRET))
    assert plain.limits == Limits(tokens_per_minute=60, max_priority=0)
    assert (other.name, other.digest) == ("bob", digest_of("another secret"))
    assert other.limits == Limits(max_live_requests=2, max_priority=0)


def test_salts_are_keyed_for_the_whole_file_or_for_single_keys(tmp_path):
    alice = f'[keys.alice]\nkey = "{SECRET}"\n'
    bob = f'[keys.bob]\nkey = "{SECRET}2"\n'

    def salted(text):
        return [bool(key.limits.salt_key) for key in read(tmp_path, text)]

    assert salted(alice + bob) == [False, False]
    assert salted(alice + "salt_by_key = true\n" + bob) == [True, False]
    assert salted("salt_by_key = true\n" + alice + bob + "salt_by_key = false") == [True, False]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "keys: Field required"),
        ("[keys]", "keys"),
        (f'keys = "{SECRET}"', "keys"),
        (f'[keys.alice]\nkey = "{SECRET}', "at end of document"),
        (f"{SECRET}\n", "at line 1"),
        (f'[keys.alice]\nkye = "{SECRET}"', "keys.alice.kye"),
        ("[keys.alice]", "needs one of key and sha256"),
        (f'[keys.alice]\nkey = "{SECRET}"\nsha256 = "{"0" * 64}"', "needs one of"),
        (f'[keys.alice]\nsha256 = "{SECRET}"', "keys.alice.sha256"),
        ('[keys.alice]\nkey = "sk-short"', "keys.alice.key"),
        (f'[keys.alice]\nkey = "{SECRET} {SECRET}"', "keys.alice.key"),
        (f'[keys.alice]\nkey = "{SECRET}"\n[keys.bob]\nkey = "{SECRET}"', "the same key"),
        (f'[keys.alice]\nkey = "{SECRET}"\ntokens_per_minute = 0', "tokens_per_minute"),
        (f'[keys.alice]\nkey = "{SECRET}"\ntokens_per_minute = "9"', "tokens_per_minute"),
        (f'[keys.alice]\nkey = "{SECRET}"\nmax_priority = 101', "max_priority"),
        (f'[keys.alice]\nkey = "{SECRET}"\nsalt_by_key = 1', "salt_by_key"),
        (f'[keys."al ice"]\nkey = "{SECRET}"', "al ice"),
        (f'[keys.alice]\nkey = "{SECRET}"\n#' + "x" * 2**22, "over the limit"),
    ],
)
def test_a_wrong_file_is_refused_by_line_and_without_its_content(tmp_path, text, message):
    with pytest.raises(KeyFileError) as refused:
        read(tmp_path, text)
    assert message in str(refused.value)
    assert "sk-" not in str(refused.value)


def test_bytes_that_are_no_text_and_files_that_are_not_there_are_named(tmp_path):
    path = tmp_path / "keys.toml"
    with pytest.raises(KeyFileError, match="cannot be read: No such file"):
        read_key_file(path)
    path.write_bytes(b"\xff")
    with pytest.raises(KeyFileError, match="byte 0 is not UTF-8"):
        read_key_file(path)


def test_keys_name_their_adapters_or_may_use_all(tmp_path):
    tenant, operator, stranger = read(
        tmp_path,
        f'[keys.tenant]\nkey = "{SECRET}"\nadapters = ["sql", "t1-*"]\n'
        f'[keys.operator]\nkey = "{SECRET}-2"\noperator = true\n'
        f'[keys.stranger]\nkey = "{SECRET}-3"\nadapters = []\n',
    )
    assert [
        name for name in ("sql", "sql2", "t1-a", "t2-a") if tenant.limits.allows_adapter(name)
    ] == [
        "sql",
        "t1-a",
    ]
    assert operator.limits.is_operator
    assert operator.limits.allows_adapter("anything")
    assert not tenant.limits.is_operator
    assert not stranger.limits.allows_adapter("sql")
