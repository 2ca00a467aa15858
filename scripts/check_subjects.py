#!/usr/bin/env python3
"""Checks the subjects of commits: `area: imperative`, at most 72 characters.

    scripts/check_subjects.py              commits since the rule holds; none in a shallow clone
    scripts/check_subjects.py MESSAGE      the file with a message, for git's hook commit-msg

Exits 1 on findings.
"""

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIRST = "4eb8ff7fc620"
"""The last commit before the rule."""
MOST_CHARACTERS = 72
_FORM = re.compile(r"[a-z0-9_./-]+(, [a-z0-9_./-]+)*: (?P<verb>[\w'-]+)")
_NO_VERBS = frozenset(
    (
        "a an the this that these those what which who how all both each every no one two some any"
        " its there it they when where if of in on by with for from as to new old more most many"
    ).split()
)


def problems(subject: str) -> Iterator[str]:
    """Yields what is wrong with a subject."""
    if len(subject) > MOST_CHARACTERS:
        yield f"has {len(subject)} characters; the limit is {MOST_CHARACTERS}"
    form = _FORM.match(subject)
    if form is None:
        yield "does not begin with an area and a colon, like `http: `"
    elif form["verb"].lower() in _NO_VERBS:
        yield f"goes on with {form['verb']!r} after its area; begin with a verb: add, refuse, move"


def subjects(arguments: list[str]) -> Iterable[str]:
    """Returns the subjects to check; merges and reverts have git's own words."""
    if arguments:
        lines = Path(arguments[0]).read_text().splitlines()[:1]
    elif _git("cat-file", "-e", f"{FIRST}^{{commit}}").returncode:
        return []
    else:
        lines = _git("log", "--no-merges", "--format=%s", f"{FIRST}..HEAD").stdout.splitlines()
    return [line for line in lines if not line.startswith(("Merge ", "Revert "))]


def main() -> None:
    """Prints every finding; exits 1 if there are any."""
    findings = [
        f"{subject!r} {problem}"
        for subject in subjects(sys.argv[1:])
        for problem in problems(subject)
    ]
    for finding in findings:
        print(finding)
    sys.exit(bool(findings))


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


if __name__ == "__main__":
    main()
