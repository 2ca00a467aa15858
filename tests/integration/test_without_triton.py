"""Engines on a CPU run without Triton, which only installations for a GPU or for tests have."""

import shutil

import pytest

from scripts.quantize_tiny import FORMATS, TINY, write_quantized
from tests.support.engine_client import engine_stub, generate
from tests.support.forked_program import run_forked
from tests.support.processes import start_engine
from tests.support.random_checkpoints import write_checkpoint

PROMPT = list(range(5, 45))
FLAGS = {"device": "cpu", "num_kv_blocks": 64, "dtype": "float32"}
IMPORTS = """
import importlib
import pkgutil
import sys

assert "triton" not in sys.modules
sys.modules["triton"] = None

import models
import services

for package in (models, services):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        is_kernel = module.name.startswith("models.kernels.")
        if not is_kernel and not module.name.endswith("__main__"):
            importlib.import_module(module.name)
try:
    import triton
except ImportError:
    print("no Triton")
"""


@pytest.fixture
def without_triton(tmp_path, monkeypatch, services_are_started):
    """Hides Triton from processes that start meanwhile, and from theirs."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text('import sys\n\nsys.modules["triton"] = None\n')
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_only_kernels_import_it():
    done = run_forked("-c", IMPORTS, modules=["torch"])
    assert (done.returncode, done.stdout) == (0, "no Triton\n"), done.stderr


async def tokens(**flags):
    async with start_engine(**FLAGS, **flags) as engine, engine_stub(engine.address) as stub:
        return (await generate(stub, PROMPT, max_tokens=8, ignore_eos=True)).token_ids


def plain(folder):
    shutil.copytree(TINY, folder)


def of_4_bits(folder):
    write_quantized(TINY, folder, FORMATS["awq"])


def with_latent_vectors(folder):
    write_checkpoint(folder, "deepseek_v32")


def with_experts(folder):
    write_checkpoint(folder, "gpt_oss")


@pytest.mark.parametrize(
    ("write", "flags"),
    [
        (plain, {"compilation_level": 3, "kv_cache_dtype": "fp8_e4m3"}),
        (plain, {"quantization": "fp8", "batch_invariant": True}),
        (of_4_bits, {}),
        (with_latent_vectors, {}),
        (with_experts, {}),
    ],
)
async def test_tokens_are_those_of_an_engine_that_has_it(write, flags, tmp_path, request):
    folder = tmp_path / "model"
    write(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder)
    expected = await tokens(model=folder, **flags)
    request.getfixturevalue("without_triton")
    assert await tokens(model=folder, **flags) == expected
