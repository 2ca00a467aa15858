"""Modules that loading a model imports; every start of a worker waits for them."""

import subprocess
import sys

from tests.support.random_checkpoints import write_checkpoint

PROGRAM = """
import sys
from pathlib import Path
import torch
from models.loading.loader import load_model

folder = Path(sys.argv[1])
for load_format in ("safetensors", "dummy"):
    load_model(folder, device=torch.device("cpu"), dtype=torch.float32, load_format=load_format)
assert not {"sympy", "torch._dynamo", "torch._inductor"} & set(sys.modules)
"""


def test_a_model_is_loaded_without_the_compiler(tmp_path):
    write_checkpoint(tmp_path, "qwen3")
    subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], check=True, timeout=120)
