"""Reads the machine code of kernels for Hopper, as nvdisasm prints it."""

import re
import subprocess
import tempfile

from triton import knobs

_READS_REGISTERS = re.compile(r"HGMMA\S* R\d+, R(\d+), gdesc")
_WAITS = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x[0-9a-f]+)")
_BRANCHES = re.compile(r"BRA\S* `\((\.L\w+)\)")
_WRITES = re.compile(r"(?:@!?U?P\d )?([A-Z][\w.]*) R(\d+)[ ,.]")
_OTHERS = ("ST", "RED", "BAR", "LDGSTS", "UTMA", "BRA", "ATOM", "SYNCS")
"""Instructions that write no register that they name first."""
_OPERANDS = 4
"""Registers of one left factor."""


def machine_code(cubin: bytes) -> list[str]:
    """Returns instructions and labels in order."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = (re.sub(r"/\*.*?\*/", "", line).strip() for line in text.splitlines())
    return [line for line in lines if re.match(r"\.L\w+:|@|[A-Z]", line)]


def early_writes(code: list[str]) -> list[str]:
    """Returns instructions that write registers while tensor cores may still read them.

    Tensor cores read the left factor from registers until a wait for the product's group.
    """
    groups: list[set[int]] = []
    begun: set[int] = set()
    found = []
    for line in _main_path(code):
        if match := _READS_REGISTERS.search(line):
            begun |= {int(match[1]) + each for each in range(_OPERANDS)}
            if "gsb0" in line:
                groups.append(begun)
                begun = set()
        elif match := _WAITS.search(line):
            num_left = int(match[1], 16)
            groups = groups[len(groups) - num_left :] if num_left else []
        elif _written(line) & begun.union(*groups):
            found.append(line)
    return found


def _main_path(code: list[str]) -> list[str]:
    """Returns the loop around the first product twice, and what follows to the last wait."""
    product = next(at for at, line in enumerate(code) if _READS_REGISTERS.search(line))
    last_wait = max(at for at, line in enumerate(code) if _WAITS.search(line))
    labels = {line.split(":")[0]: at for at, line in enumerate(code) if line.startswith(".L")}
    start, end = max(
        (labels[match[1]], at)
        for at, line in enumerate(code[: last_wait + 1])
        if at > product and (match := _BRANCHES.search(line)) and labels.get(match[1], at) < product
    )
    return code[start : end + 1] * 2 + code[end + 1 : last_wait + 1]


def _written(line: str) -> set[int]:
    match = _WRITES.match(line)
    if match is None or match[1].startswith(_OTHERS):
        return set()
    parts = match[1].split(".")
    num = 4 if "LDSM" in parts or "128" in parts else 1
    if parts[0] == "CS2R" or "64" in parts or "WIDE" in parts:
        num = 2
    return {int(match[2]) + each for each in range(num)}
