"""The secret of an engine's hosts."""

import os

import pytest

from services.engine.edge.node_secret import NodeSecret, NodeSecretError, make_nonce

SECRET = NodeSecret(b"sixteen bytes and more")


def test_both_sides_prove_the_same_secret():
    ours, theirs = make_nonce(), make_nonce()
    assert SECRET.accepts(SECRET.prove("node", theirs, ours), "node", theirs, ours)


def test_a_proof_holds_for_one_side_and_one_connection():
    ours, theirs = make_nonce(), make_nonce()
    proof = SECRET.prove("head", theirs, ours)
    assert not SECRET.accepts(proof, "node", theirs, ours)
    assert not SECRET.accepts(proof, "head", theirs, make_nonce())
    assert not SECRET.accepts(SECRET.prove("head", ours, theirs), "head", theirs, ours)


def test_another_secret_or_none_is_no_proof():
    ours, theirs = make_nonce(), make_nonce()
    for other in (NodeSecret(b"another one of 16 bytes"), NodeSecret()):
        assert not SECRET.accepts(other.prove("node", theirs, ours), "node", theirs, ours)


def test_who_has_no_secret_asks_for_none():
    ours, theirs = make_nonce(), make_nonce()
    assert NodeSecret().accepts(SECRET.prove("node", theirs, ours), "node", theirs, ours)


def test_space_around_a_secret_in_a_file_does_not_count(tmp_path):
    files = [tmp_path / "a", tmp_path / "b"]
    for file, content in zip(files, ("secret of 16 bytes", "secret of 16 bytes\n"), strict=True):
        file.touch(mode=0o600)
        file.write_text(content)
    first, second = map(NodeSecret.from_file, files)
    assert first.prove("head", b"a", b"b") == second.prove("head", b"a", b"b")
    assert not NodeSecret.from_file(None)


def test_a_file_without_a_good_secret_is_refused(tmp_path):
    with pytest.raises(NodeSecretError, match="absent cannot be read: No such file"):
        NodeSecret.from_file(tmp_path / "absent")
    short = tmp_path / "short"
    short.write_text("fifteen bytes..\n")
    with pytest.raises(NodeSecretError, match="has 15 bytes; 16 are the least"):
        NodeSecret.from_file(short)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(NodeSecretError, match="not a regular file"):
        NodeSecret.from_file(tmp_path / "fifo")
