#!/usr/bin/env python3
"""Finds words that plain English does without, each with its replacement.

    scripts/check_words.py [path ...]    without paths: all files that git knows

Reads docstrings, comments, messages of `raise`, help texts and names in Python; comments in protos,
scripts and YAML; prose in Markdown. Code in backticks and flags do not count. Exits 1 on findings.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
# History is not rewritten.
EXCLUDED = ("CHANGELOG.md", "LICENSE", "docs/decisions/", "_pb2")

# A capital begins a sentence; headings and questions may begin with "who". A space is any space.
PROSE = {
    r"(?<!#\s)\bWh(at|o)\b(?![^.]*\?)": "begin with the subject: a noun, or a verb of the function",
    r"\b[Ww]hom?ever\b": "the caller, the client, the operator",
    r"\b([Nn]|[Ee]very|[Ss]ome|[Aa]ny)(o?body)\b": "no request, all callers, another process",
    r"\b[Tt]hose (that|who|which|whose)\b": "repeat the noun: requests that",
    r"\b[Ss]o many\b": "the number: `num_x` tokens",
    r"\banew\b": "again",
    r"\b[Bb]ehind\b": "after",
    r"\b[Rr]ehears\w*": "warm-up, dummy run",
    r"\b[Oo]bituar\w*": "last words, exit report",
    r"\b[Pp]atien(t|ce|tly)\b": "timeout, time limit",
    r"\b[Ll]ate builds?\b": "recompilation, a kernel built while serving",
    r"\b[A-Z]+ numbers\b|\bnumbers (in|of) (a|an|each|every|one|the|both)\s+"
    r"(\w+ )?(row|head|column|vector|matri|weight|tensor|key|latent|activation)"
    r"|\b(head's|weight's|weights into|plain) numbers\b": "elements, values",
    r"\b(KV|[Cc]ache|[Ff]ree) pages?\b(?! cache)": "block",
    r"\b([Tt]ell(s|ing)?|told)\b": "reports, sends, notifies, says, distinguishes",
    r"\b([Hh]ears?|heard)\b": "receives, is notified",
    r"\b[Ss]t(ands?|ood)\b(?! for\b| in for\b|-)": "is, is in, is stored at",
    r"\b[Ll](ies?|ay) (in|at|between|beside|on|over|there|under|where)\b": "is in, is at",
    r"\b(has|have) not(?=[.,;:]|\s+(a|an|all|its|so|the|their)\b)": "does not have, lacks",
    r"\b[Pp]laces\b": "slots, positions, a limit",
}
ALLOWED = re.compile(
    r"\b[Bb]ehind\s+((an?|the|its|this|one|several|another)\s+)?([\w-]+\s+)?"
    r"(proxy|proxies|balancer|HAProxy|gateway|frontends?|NAT|firewall|port|address)\b"
    r"|\b(lag\w*|left|leaves?|falls?|fell) behind\b|\bunless told otherwise\b"
)
NAMES = re.compile(
    r"rehears|obituar|patien|nobody|whoever|everybody|somebody|anew(?![a-z])|behind|late_?build",
    re.IGNORECASE,
)
# Flags and figures that operators know, and words that mean what they say.
ALLOWED_NAMES = re.compile(
    r"worker_patience_s|fail_on_late_build|num_late_builds"
    r"|(lea[vf]\w*|left|lag\w*|fall\w*)_(\w+_)?behind"
)

# Code, flags, addresses and quotations are not prose.
CODE = re.compile(
    r"```.*?```|`[^`]*`|\"[^\"\n]*\"|--[a-z][\w-]*|\]\([^)]*\)|https?://\S+", re.DOTALL
)
PATTERNS = [
    (re.compile(pattern.replace(" ", r"\s+")), instead) for pattern, instead in PROSE.items()
]


class Finding(NamedTuple):
    """A word that should be another one, and the line it is on."""

    line: int
    word: str
    instead: str


def in_prose(text: str, first_line: int = 1) -> Iterator[Finding]:
    """Yields the findings in a piece of prose whose first line has the given number."""
    text = CODE.sub(_blank, text)
    text = ALLOWED.sub(_blank, text)
    for pattern, instead in PATTERNS:
        for match in pattern.finditer(text):
            line = first_line + text.count("\n", 0, match.start())
            yield Finding(line, " ".join(match[0].split()), instead)


def in_python(source: str) -> Iterator[Finding]:
    """Yields the findings in a module's docstrings, comments, messages and names."""
    # Most modules have none: without marks of strings and comments, all of the text is searched.
    text = re.sub(r'\bf?"|#', " ", source)
    if not NAMES.search(text) and not any(pattern.search(text) for pattern, _ in PATTERNS):
        return
    for text, line in _strings(ast.parse(source)):
        yield from in_prose(text, line)
    comments: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments.append((token.start[0], token.string.lstrip("#")))
        elif token.type == tokenize.NAME and NAMES.search(ALLOWED_NAMES.sub("", token.string)):
            yield Finding(token.start[0], token.string, "a name from the glossary")
    yield from _in_comments(comments)


def in_file(path: Path) -> list[Finding]:
    """Returns a file's findings in the order of its lines."""
    text = path.read_text()
    named = NAMES.search(path.stem)
    findings = [Finding(1, path.name, "a file name from the glossary")] if named else []
    if path.suffix == ".py":
        findings += in_python(text)
    elif path.suffix == ".md":
        findings += in_prose(text)
    else:
        sign = "//" if path.suffix == ".proto" else "#"
        parts = ((n, line.partition(sign)) for n, line in enumerate(text.splitlines(), 1))
        findings += _in_comments((n, comment) for n, (_, found, comment) in parts if found)
    return sorted(set(findings))


def files(arguments: list[str]) -> Iterator[Path]:
    """Yields the files to read: of git, under the given paths."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "--", *arguments],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for name in listed.rstrip("\0").split("\0"):
        path = ROOT / name
        if any(part in name for part in EXCLUDED) or not path.is_file():
            continue
        is_script = name.startswith("scripts/") and not path.suffix
        if path.suffix in {".py", ".proto", ".md", ".yml", ".yaml", ".Dockerfile"} or is_script:
            yield path


def main() -> None:
    """Prints every finding; exits 1 if there are any."""
    count = 0
    for path in files(sys.argv[1:]):
        for line, word, instead in in_file(path):
            print(f'{path.relative_to(ROOT)}:{line}: "{word}" -> {instead}')
            count += 1
    if count:
        sys.exit(f"{count} findings; words to use: docs/architecture.md, glossary")


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"\S", "~", match[0])


def _strings(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yields docstrings, texts of `raise` and of help, each with its line."""
    for node in ast.walk(tree):
        roots: list[ast.expr] = []
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            roots = [node.value]
        elif isinstance(node, ast.Raise) and node.exc:
            roots = [node.exc]
        elif isinstance(node, ast.keyword) and node.arg in {"help", "description", "epilog"}:
            roots = [node.value]
        for part in (part for root in roots for part in ast.walk(root)):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield part.value, part.lineno


def _in_comments(comments: Iterable[tuple[int, str]]) -> Iterator[Finding]:
    """Yields the findings in comments, whose consecutive lines are one piece of prose."""
    block: list[str] = []
    first = 0
    for line, text in comments:
        if block and line != first + len(block):
            yield from in_prose("\n".join(block), first)
            block = []
        if not block:
            first = line
        block.append(text)
    yield from in_prose("\n".join(block), first)


if __name__ == "__main__":
    main()
