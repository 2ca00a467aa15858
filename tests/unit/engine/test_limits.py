"""The service process and the worker work out the same limits, each from its own reading."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from services.engine.checkpoint.model_folder import ModelFolder
from services.engine.config.checkpoint import TINY_CHECKPOINT
from services.engine.limits import StepLimits
from services.engine.worker.start.loaded_model import LoadedModel
from tests.support.engine_harness import engine_config


def test_service_and_worker_have_the_same_limits_with_windows_too(tmp_path):
    torch.set_num_threads(1)
    folder = shutil.copytree(TINY_CHECKPOINT, tmp_path / "windows")
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    windows = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
    path.write_text(json.dumps({**fields, **windows, "layer_types": None}))
    config = engine_config(model=folder, device="cpu", max_model_len=None)
    model = ModelFolder.open(folder, name="m", max_model_len=None)
    limits = StepLimits.of(
        config,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        cache_windows=model.config.cache_windows,
    )
    assert limits.windows == (None, 64, 64)
    assert limits.block_table_width == 3 * limits.max_blocks_per_seq
    assert limits.shared_prefix_tokens is None  # the worker says, and on a CPU 0
    assert LoadedModel.load(config).limits == replace(limits, shared_prefix_tokens=0)


@pytest.mark.parametrize(
    ("flags", "windows", "expected"),
    [
        ({}, [None, 64], 48),
        ({"shared_prefix_tokens": "auto"}, [None], None),
        ({"shared_prefix_tokens": 0}, [None], 0),
        ({"enable_prefix_caching": False}, [None], 0),
        ({"batch_invariant": True}, [None], 0),
        ({"num_speculative_tokens": 2}, [None], 48),
        ({}, [64], 0),
        ({}, ["state"], 0),
    ],
    ids=str,
)
def test_prefixes_are_shared_where_attention_can_read_them_once(flags, windows, expected):
    config = engine_config(**{"shared_prefix_tokens": 48, **flags})
    limits = StepLimits.of(config, max_model_len=256, vocab_size=97, cache_windows=windows)
    assert limits.shared_prefix_tokens == expected
