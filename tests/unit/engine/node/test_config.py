"""Flags of a node."""

import pytest
from pydantic import ValidationError

from services.engine.node.command import run_node
from services.engine.node.config import NodeConfig


def test_the_head_and_the_number_come_from_the_environment_of_torchrun(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "50051")
    monkeypatch.setenv("GROUP_RANK", "3")
    config = NodeConfig()
    assert (config.head, config.node_rank) == ("localhost:50051", 3)
    given = NodeConfig(head="[::1]:9", node_rank=1)
    assert (given.head, given.node_rank) == ("[::1]:9", 1)
    monkeypatch.setenv("OCTAVO_NODE_HEAD", "localhost:7")
    assert NodeConfig().head == "localhost:7"


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({}, "--head is absent"),
        ({"head": "engine"}, "--head: 'engine' is no host:port"),
        ({"head": "engine:1"}, "needs --secret-file or --tls-ca"),
        ({"head": "192.0.2.1:1", "secret_file": "s"}, "needs --interface"),
        ({"head": "localhost:1", "node_rank": 0}, "greater than or equal to 1"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags, reason):
    with pytest.raises(ValidationError, match=reason):
        NodeConfig(**flags)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "--head is absent: it is needed, or MASTER_ADDR"),
        (["--head", "localhost:1", "--interface", "nothing0"], "interface nothing0 has no"),
        (["--head", "localhost:1", "--secret-file", "/absent"], "/absent cannot be read"),
        (["--head", "localhost:1", "--tls-ca", "/absent"], "/absent cannot be read"),
        (["--head", "localhost:1", "--node-rank", "x"], "--node-rank: "),
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
    ],
)
def test_a_mistake_is_one_line_for_the_operator(arguments, line, capsys):
    assert run_node(arguments) == 2
    written = capsys.readouterr().err
    assert written.startswith("octavo worker-node: ")
    assert line in written
    assert written.count("\n") == 1
