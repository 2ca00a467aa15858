from dataclasses import replace

import pytest
import torch
from structlog.testing import capture_logs

from models.config import ModelConfig
from models.kv_cache import FP8_CACHE_DTYPE
from models.quantization.config import QuantizationConfig, WeightScheme
from scripts.quantize_tiny import TINY
from services.engine.config.cache import CacheConfig
from services.engine.config.checkpoint import CheckpointConfig
from services.engine.config.worker import WorkerConfig
from services.engine.worker.start.device import choose_cache_dtype, choose_device, choose_dtype
from tests.support.gpu_facts import use_gpu

CPU, GPU = torch.device("cpu"), torch.device("cuda")
HOPPER, AMPERE = (9, 0), (8, 0)


def chosen(monkeypatch, scheme, *, asked="auto", stored="float16", capability=HOPPER, device=GPU,
           method="awq"):  # fmt: skip
    """Returns the dtype of a checkpoint, and what the log says of it."""
    use_gpu(monkeypatch, capability)
    quantization = scheme and QuantizationConfig(method=method, schemes=(scheme,))
    model = replace(ModelConfig.from_folder(TINY), dtype=stored, quantization=quantization)
    with capture_logs() as lines:
        dtype = choose_dtype(CheckpointConfig(dtype=asked), model, device)
    return dtype, [line["event"] for line in lines]


INT4 = WeightScheme(kind="int4", group_size=128)


@pytest.mark.parametrize(
    ("scheme", "method"),
    [
        (INT4, "gptq"),
        (WeightScheme(kind="int4"), "compressed-tensors"),
        (WeightScheme(kind="int8"), "compressed-tensors"),
        (WeightScheme(kind="nvfp4", group_size=16), "modelopt"),
        (WeightScheme(kind="mxfp4", group_size=32), "mxfp4"),
    ],
)
def test_float16_checkpoints_that_stay_packed_are_computed_in_bfloat16(monkeypatch, scheme, method):
    dtype, events = chosen(monkeypatch, scheme, method=method)
    assert (dtype, events) == (torch.bfloat16, ["dtype_changed"])


@pytest.mark.parametrize(
    ("scheme", "others"),
    [
        (None, {}),
        (WeightScheme(kind="int4", group_size=16), {}),
        (WeightScheme(kind="int8", group_size=16), {}),
        (WeightScheme(kind="fp8"), {}),
        (INT4, {"capability": AMPERE}),
        (INT4, {"capability": (10, 0)}),
    ],
)
def test_other_checkpoints_have_the_dtype_that_they_say(monkeypatch, scheme, others):
    assert chosen(monkeypatch, scheme, **others) == (torch.float16, [])


def test_bfloat16_and_a_cpu_need_no_change(monkeypatch):
    assert chosen(monkeypatch, INT4, stored="bfloat16") == (torch.bfloat16, [])
    assert chosen(monkeypatch, INT4, device=CPU) == (torch.float32, [])


@pytest.mark.parametrize("asked", ["float16", "float32"])
def test_a_dtype_that_costs_the_4_bits_is_obeyed_and_logged(monkeypatch, asked):
    dtype, events = chosen(monkeypatch, INT4, asked=asked)
    assert (dtype, events) == (getattr(torch, asked), ["weights_dequantised"])


def test_the_cache_is_in_the_models_dtype_by_default():
    assert choose_cache_dtype(CacheConfig(), torch.bfloat16, CPU) == torch.bfloat16
    config = CacheConfig(kv_cache_dtype="fp8_e4m3")
    assert choose_cache_dtype(config, torch.bfloat16, CPU) == FP8_CACHE_DTYPE


def test_a_rank_without_a_gpu_of_its_own_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="GPU 2 is wanted; this machine has 2, from 0 on"):
        choose_device(WorkerConfig(), 2)
