import subprocess
import sys

import torch

from models.kernels import gpu
from models.kv_cache import KVCacheSpec
from models.ops.attention.attention_metadata import make_attention_workspace
from models.ops.attention.cudagraph_support import AttentionCGSupport, attention_cudagraph_support

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SPEC = KVCacheSpec(num_heads=4, num_kv_heads=2, head_dim=8)


def test_the_reference_supports_recordings_on_a_cpu():
    assert attention_cudagraph_support(CPU) is AttentionCGSupport.ALWAYS
    assert make_attention_workspace([SPEC], device=CPU) is None


def test_the_kernels_support_all_steps_where_triton_is_installed(monkeypatch):
    monkeypatch.setattr(gpu, "HAS_TRITON", True)
    assert attention_cudagraph_support(CUDA) is AttentionCGSupport.ALWAYS
    read_back = attention_cudagraph_support(CUDA, caches_new_keys=True)
    assert read_back is AttentionCGSupport.UNIFORM_BATCH
    monkeypatch.setattr(gpu, "HAS_TRITON", False)
    assert attention_cudagraph_support(CUDA) is AttentionCGSupport.NEVER


def test_more_support_is_larger():
    assert sorted(AttentionCGSupport) == [
        AttentionCGSupport.NEVER,
        AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE,
        AttentionCGSupport.UNIFORM_BATCH,
        AttentionCGSupport.ALWAYS,
    ]


def test_models_import_no_triton():
    program = (
        "import sys, torch; before = 'triton' in sys.modules\n"
        "import models.qwen3, models.llama, models.ops.attention.attention_metadata\n"
        "assert before or 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
