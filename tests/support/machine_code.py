"""Reads the machine code of kernels for Hopper, as nvdisasm prints it."""

import hashlib
import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton import knobs
from triton.knobs import NvidiaTool
from triton.runtime.cache import get_cache_manager

IS_COMPILER_OF_GPUS = triton.__version__.startswith("3.6.")
"""Whether this Triton is the one of constraints-gpu.txt, with whose assembler kernels were fitted
into registers: 3.7's keeps one value of some tiles in memory, 3.9's does not."""

_READS_REGISTERS = re.compile(r"HGMMA\S* R\d+, R(\d+), gdesc")
_WAITS = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x[0-9a-f]+)")
_BRANCHES = re.compile(r"BRA\S* `\((\.L\w+)\)")
_WRITES = re.compile(r"(?:@!?U?P\d )?([A-Z][\w.]*) R(\d+)[ ,.]")
_OTHERS = ("ST", "RED", "BAR", "LDGSTS", "UTMA", "BRA", "ATOM", "SYNCS")
"""Instructions that write no register that they name first."""
_OPERANDS = 4
"""Registers of one left factor."""
_PRINTED = "printed"


def machine_code(cubin: bytes) -> list[str]:
    """Returns instructions and labels in order."""
    # Its analysis of the data flow takes longer and changes nothing here.
    text = _printed(cubin, knobs.nvidia.nvdisasm, "-c", "-ndf")
    lines = (re.sub(r"/\*.*?\*/", "", line).strip() for line in text.splitlines())
    return [line for line in lines if re.match(r"\.L\w+:|@|[A-Z]", line)]


def registers(cubin: bytes) -> int:
    """Returns how many registers a thread has when its program starts."""
    text = _printed(cubin, knobs.nvidia.cuobjdump, "-res-usage")
    return int(re.findall(r"REG:(\d+)", text)[0])


def early_writes(code: list[str]) -> list[str]:
    """Returns instructions that write registers while tensor cores may still read them.

    Tensor cores read the left factor from registers until a wait for the product's group.
    """
    return [line for path in _paths(code) for line in _early_writes(path)]


def check_unpacked_products(code: list[str]) -> None:
    """Asserts that products whose left factor is unpacked into registers are right and together."""
    early = early_writes(code)
    assert not early, early
    # The compiler did not begin products one by one.
    products = [line for line in code if "HGMMA" in line]
    assert sum("gsb0" in line for line in products) < len(products)
    # No register is kept in memory while products are under way.
    for start, end in product_loops(code):
        assert not IS_COMPILER_OF_GPUS or not spills(code[start:end])


def spills(code: list[str]) -> int:
    """Returns how many instructions keep registers in memory, or take them from there."""
    return sum("STL" in line or "LDL" in line for line in code)


def product_loops(
    code: list[str], product: str | re.Pattern[str] = _READS_REGISTERS
) -> list[tuple[int, int]]:
    """Returns the first and last line of each innermost loop with products, in order.

    product: what lines of products match; by default products with the left factor in registers.
    Waits that failed jump back into larger ones, from the end of the code.
    """
    labels = {line.split(":")[0]: at for at, line in enumerate(code) if line.startswith(".L")}
    branches = [(at, _BRANCHES.search(line)) for at, line in enumerate(code)]
    loops = [(labels.get(match[1], at), at) for at, match in branches if match is not None]
    products = [at for at, line in enumerate(code) if re.search(product, line)]
    around = [
        min(holding, key=lambda loop: loop[1] - loop[0])
        for product in products
        if (holding := [loop for loop in loops if loop[0] < product < loop[1]])
    ]
    assert around, "products are in a loop"
    return sorted(
        loop for loop in set(around) if not any(loop[0] < other[0] < loop[1] for other in around)
    )


def _printed(cubin: bytes, tool: NvidiaTool, *options: str) -> str:
    """Returns what a tool prints of a kernel, which Triton's cache keeps."""
    version = f"{tool.version} {Path(tool.path).name} {options}"
    kept = get_cache_manager(hashlib.sha256(cubin + version.encode()).hexdigest())
    if (path := kept.get_file(_PRINTED)) is not None:
        return Path(path).read_text()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool.path, *options, file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    kept.put(text, _PRINTED, binary=False)
    return text


def _early_writes(path: list[str]) -> list[str]:
    groups: list[set[int]] = []
    begun: set[int] = set()
    found = []
    for line in path:
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


def _paths(code: list[str]) -> list[list[str]]:
    """Returns each loop with products twice, and what follows to the last wait before the next."""
    loops = product_loops(code)
    ends = [start for start, _ in loops[1:]] + [len(code)]
    paths = []
    for (start, end), next_start in zip(loops, ends, strict=True):
        last_wait = max(at for at in range(start, next_start) if _WAITS.search(code[at]))
        paths.append(code[start : end + 1] * 2 + code[end + 1 : last_wait + 1])
    return paths


def _written(line: str) -> set[int]:
    match = _WRITES.match(line)
    if match is None or match[1].startswith(_OTHERS):
        return set()
    parts = match[1].split(".")
    num = 4 if "LDSM" in parts or "128" in parts else 1
    if parts[0] == "CS2R" or "64" in parts or "WIDE" in parts:
        num = 2
    return {int(match[2]) + each for each in range(num)}
