import pytest
import torch

from models.config import ModelConfig
from models.kv_cache import FP8_CACHE_DTYPE
from services.engine.config.cache import CacheConfig
from services.engine.config.checkpoint import TINY_CHECKPOINT
from services.engine.config.worker import WorkerConfig
from services.engine.worker.start.device import choose_cache_dtype, choose_device
from tests.support.random_checkpoints import write_checkpoint

CPU = torch.device("cpu")
TINY = ModelConfig.from_folder(TINY_CHECKPOINT)


def test_the_cache_is_in_the_models_dtype_by_default():
    assert choose_cache_dtype(CacheConfig(), TINY, torch.bfloat16, CPU) == torch.bfloat16
    config = CacheConfig(kv_cache_dtype="fp8_e4m3")
    assert choose_cache_dtype(config, TINY, torch.bfloat16, CPU) == FP8_CACHE_DTYPE


def test_latent_vectors_are_not_kept_in_8_bits(tmp_path):
    write_checkpoint(tmp_path, "deepseek_v3")
    model = ModelConfig.from_folder(tmp_path)
    assert choose_cache_dtype(CacheConfig(), model, torch.float32, CPU) == torch.float32
    config = CacheConfig(kv_cache_dtype="fp8_e4m3")
    with pytest.raises(ValueError, match="DeepseekV3ForCausalLM caches latent vectors"):
        choose_cache_dtype(config, model, torch.float32, CPU)


def test_a_rank_without_a_gpu_of_its_own_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="GPU 2 is wanted; this machine has 2, from 0 on"):
        choose_device(WorkerConfig(), 2)
