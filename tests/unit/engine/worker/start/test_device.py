import pytest
import torch

from models.kv_cache import FP8_CACHE_DTYPE
from services.engine.config.cache import CacheConfig
from services.engine.config.worker import WorkerConfig
from services.engine.worker.start.device import choose_cache_dtype, choose_device

CPU = torch.device("cpu")


def test_the_cache_is_in_the_models_dtype_by_default():
    assert choose_cache_dtype(CacheConfig(), torch.bfloat16, CPU) == torch.bfloat16
    config = CacheConfig(kv_cache_dtype="fp8_e4m3")
    assert choose_cache_dtype(config, torch.bfloat16, CPU) == FP8_CACHE_DTYPE


def test_a_rank_without_a_gpu_of_its_own_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="GPU 2 is wanted; this machine has 2, from 0 on"):
        choose_device(WorkerConfig(), 2)
