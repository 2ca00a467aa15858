"""The check of words on sentences and modules that are good and bad."""

import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "check_words.py"
_spec = spec_from_file_location("check_words", SCRIPT)
check_words = module_from_spec(_spec)
_spec.loader.exec_module(check_words)


@pytest.mark.parametrize(
    ("sentence", "word"),
    [
        ("What this engine has.", "What"),
        ("Slow. Who waits longest goes first.", "Who"),
        ("Ends whoever waits.", "whoever"),
        ("A step of nobody's requests.", "nobody"),
        ("Drops those\nthat ended.", "those that"),
        ("Waits for so many tokens.", "so many"),
        ("Starts anew.", "anew"),
        ("The token behind the last draft.", "behind"),
        ("Rehearses steps.", "Rehearses"),
        ("Its patience ends.", "patience"),
        ("A late build costs 3 s.", "late build"),
        ("The C numbers of a latent vector.", "C numbers"),
        ("Numbers, such as the numbers of a row.", "numbers of a row"),
        ("Frees cache pages.", "cache pages"),
        ("The router is told.", "told"),
        ("The client hears of it.", "hears"),
        ("The id stands in the table.", "stands"),
        ("Weights lie in memory.", "lie in"),
        ("Refuses what the engine has not.", "has not"),
        ("Counts free places.", "places"),
    ],
)
def test_a_sentence_in_the_dialect_is_found(sentence, word):
    assert [found.word for found in check_words.in_prose(sentence)] == [word]


@pytest.mark.parametrize(
    "sentence",
    [
        "What happens to a request that ends?",
        "## What is kept",
        "Returns what the model made of a step.",
        "An engine behind a load\nbalancer, or behind the HAProxy in `deploy`.",
        "A caller that lags behind is left behind.",
        'An option, unless told otherwise: "Tell me."',
        "Set `--worker-patience-s`, or --worker-patience-s 0.",
        "Draws random numbers; the numbers of steps are counted.",
        "The file is in the page cache; /metrics is a page.",
        "Adds in place; the first takes place before the second.",
        "A stand-in for the worker, by a standard that stands for a network.",
        "The layer has not run yet.",
        "See [its notes](whoever.md).",
        "```\nnobody behind\n```",
    ],
)
def test_a_plain_sentence_is_not_found(sentence):
    assert list(check_words.in_prose(sentence)) == []


def test_docstrings_comments_messages_and_names_count_and_other_strings_do_not():
    source = '''"""Begins anew."""
def rehearse(left_behind, worker_patience_s):
    """Runs steps.

    Those that ended are gone.
    """
    x = "anew"  # nobody
    # One comment on two lines, so
    # many words.
    raise ValueError(f"{x} is told")
'''
    found = sorted(check_words.in_python(source))
    assert [(f.line, f.word) for f in found] == [
        (1, "anew"),
        (2, "rehearse"),
        (5, "Those that"),
        (7, "nobody"),
        (8, "so many"),
        (10, "told"),
    ]


def test_protos_and_scripts_count_by_their_comments(tmp_path):
    proto = tmp_path / "a.proto"
    proto.write_text("message Nobody {}  // Nobody's.\n")
    script = tmp_path / "b.yml"
    script.write_text("nobody: 1\n# Starts anew.\n")
    assert [f.line for f in check_words.in_file(proto)] == [1]
    assert [f.line for f in check_words.in_file(script)] == [2]


def test_a_clean_path_passes():
    done = subprocess.run(
        [sys.executable, SCRIPT, "scripts/check_words.py"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
