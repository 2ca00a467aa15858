"""Hostile sizes in config.json end in one clear line before memory is allocated for them."""

import json
import shutil
import tracemalloc

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.config import ConfigError, ModelConfig
from models.config_sections.fields import LARGEST, MAX_FILE_BYTES
from models.loading.checkpoint import SINGLE_FILE, CheckpointError
from models.loading.loader import MAX_FULL_TABLE, load_model
from services.engine.compilation.graphs.dispatch_mode import DispatchMode
from tests.support.damaged_checkpoints import copy_checkpoint, edit_config

VARIANTS = ("llama", "gpt_oss", "deepseek_v32", "deepseek_v4", "minimax_m3")
MAX_TENSOR_BYTES = 2**28
"""A table of 2^20 rotations of a small model's heads fits; weights of hostile sizes do not."""
MAX_PYTHON_BYTES = 2**26
MAX_LINE = 1000
NUMBERS = st.one_of(
    st.sampled_from([0, -1, 1, 2, 3, 7, 1000, 2**16, 2**20, 2**22, 2**31 - 1, 2**31, 2**40]),
    st.sampled_from([2**62, 2**64, 10**400, 0.5, 1e-300, 1e300, float("inf"), float("nan")]),
    st.sampled_from([True, None, "8", [], [2**31], {}, "x" * 5000, [0] * 5000]),
)


class Allocations(DispatchMode):
    """Notes the largest tensor that is made in real memory while it is entered."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, tuple | list) else (result,):
            if isinstance(made, torch.Tensor) and not made.is_meta:
                self.largest = max(self.largest, made.untyped_storage().nbytes())
        return result


def numeric_fields(config, prefix=()):
    """Yields the paths of all numeric values of a config, and of lists and objects of them."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from numeric_fields(value, (*prefix, name))
        if not isinstance(value, str):
            yield (*prefix, name)


def changed(config, path, value):
    name, *rest = path
    inner = config.get(name)
    if rest and isinstance(inner, dict):
        value = changed(inner, rest, value)
    return {**config, name: value}


@pytest.fixture(scope="module", params=VARIANTS)
def folder(request, checkpoint, tmp_path_factory):
    source = checkpoint(request.param)[0]
    target = copy_checkpoint(source, tmp_path_factory.mktemp("hostile"))
    shutil.copy(target / "config.json", target / "sound.json")
    return target


def load(folder):
    """Loads a model for sequences of 64 tokens; returns the largest tensor made, in bytes."""
    largest = (folder / SINGLE_FILE).stat().st_size
    with Allocations() as allocations:
        load_model(folder, device=torch.device("cpu"), dtype=torch.float32, max_positions=64)
    return max(0, allocations.largest - largest)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_number_ends_in_a_model_or_in_one_line(folder, data):
    config = json.loads((folder / "sound.json").read_text())
    paths = sorted(numeric_fields(config))
    for _ in range(data.draw(st.integers(1, 2))):
        config = changed(config, data.draw(st.sampled_from(paths)), data.draw(NUMBERS))
    (folder / "config.json").write_text(json.dumps(config))
    tracemalloc.start()
    message = ""
    try:
        assert load(folder) <= MAX_TENSOR_BYTES
    except (ConfigError, CheckpointError, ValueError) as error:
        message = str(error)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak <= MAX_PYTHON_BYTES
    assert len(message) <= MAX_LINE + len(str(folder))
    assert "\n" not in message


@pytest.mark.parametrize("name", ["hidden_size", "intermediate_size", "vocab_size"])
def test_a_size_that_the_weights_do_not_have_is_refused_before_it_is_allocated(
    checkpoint, tmp_path, name
):
    folder = copy_checkpoint(checkpoint("llama")[0], tmp_path)
    edit_config(**{name: LARGEST.get(name, 2**20)}, head_dim=8)(folder)
    with Allocations() as allocations, pytest.raises(CheckpointError, match="the model needs"):
        load_model(folder, device=torch.device("cpu"), dtype=torch.float32)
    assert allocations.largest <= (folder / SINGLE_FILE).stat().st_size


def test_a_long_context_costs_no_more_rotations_than_are_served(checkpoint, tmp_path):
    folder = copy_checkpoint(checkpoint("llama")[0], tmp_path)
    edit_config(max_position_embeddings=2**31 - 1)(folder)
    model = load_model(folder, device=torch.device("cpu"), dtype=torch.float32, max_positions=64)
    assert len(model.model.rotary.table) == 64
    edit_config(max_position_embeddings=2 * MAX_FULL_TABLE // 1024)(folder)
    model = load_model(folder, device=torch.device("cpu"), dtype=torch.float32, max_positions=64)
    assert len(model.model.rotary.table) == 2 * MAX_FULL_TABLE // 1024


def test_a_config_without_end_is_not_read(checkpoint, tmp_path):
    folder = copy_checkpoint(checkpoint("llama")[0], tmp_path)
    with (folder / "config.json").open("r+b") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(ConfigError, match=f"the limit is {MAX_FILE_BYTES}"):
        ModelConfig.from_folder(folder)
