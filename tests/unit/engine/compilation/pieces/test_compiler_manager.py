import pytest
import torch

from services.engine.compilation.cache.artifact_cache import ArtifactCache
from services.engine.compilation.cache.cache_key import Factors
from services.engine.compilation.pieces.compiler_manager import CompilerManager
from tests.support.compiled_models import CountingCompiler, Toy, linked, traced_program

FACTORS = Factors({"torch.version": "1"})


@pytest.fixture
def compiler():
    return CountingCompiler()


@pytest.fixture
def cache(tmp_path):
    return ArtifactCache.open(tmp_path, FACTORS)


def run(compiler, cache, body=lambda _, x: x * 2, width=4):
    """Traces a toy as a new process would and returns what the manager did."""
    manager = CompilerManager(compiler, {}, cache=cache, factors=FACTORS)
    forward = linked(traced_program(Toy(body), torch.ones(5, width)), manager)
    x = torch.ones(3, width)
    torch.testing.assert_close(forward(x), body(None, x))
    return manager.stats


def test_a_second_start_loads_what_the_first_compiled(compiler, cache):
    assert (run(compiler, cache).num_loaded, compiler.num_compiled) == (0, 1)
    assert (run(compiler, cache).num_loaded, compiler.num_compiled) == (1, 1)


def test_another_graph_or_another_shape_is_compiled_again(compiler, cache):
    run(compiler, cache)
    run(compiler, cache, body=lambda _, x: x * 3)
    run(compiler, cache, width=6)
    assert (compiler.num_compiled, compiler.num_loaded) == (3, 0)


def test_without_a_cache_nothing_is_loaded(compiler):
    run(compiler, None)
    run(compiler, None)
    assert (compiler.num_compiled, compiler.num_loaded) == (2, 0)


def test_an_artifact_that_does_not_load_is_compiled_and_replaced(compiler, cache):
    run(compiler, cache)
    (path,) = cache.folder.glob("*.piece")
    cache.store(path.stem, b"of another torch")
    assert run(compiler, cache).num_loaded == 0
    assert run(compiler, cache).num_loaded == 1
