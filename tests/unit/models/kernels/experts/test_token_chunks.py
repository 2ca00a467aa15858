import pytest
import torch

from models.kernels.experts.token_chunks import MOST_SCRATCH_BYTES, scratch_bytes, token_chunks
from models.number_formats import FP8
from models.operands.experts import ExpertWeights
from tests.support.programs import run_building


def experts_of(num_experts, hidden, inner, dtype=torch.bfloat16):
    """Returns experts without values: chunks depend on shapes."""
    scale = torch.empty(num_experts, 1, 1, device="meta") if dtype == FP8 else None
    return ExpertWeights(
        gate_up=torch.empty(num_experts, 2 * inner, hidden, dtype=dtype, device="meta"),
        down=torch.empty(num_experts, hidden, inner, dtype=dtype, device="meta"),
        gate_up_scale=scale,
        down_scale=scale,
    )


MODELS = {
    "DeepSeek-V3": (experts_of(256, 7168, 2048), 8),
    "DeepSeek-V3-fp8": (experts_of(256, 7168, 2048, FP8), 8),
    "DeepSeek-V3-fp8-8-ranks": (experts_of(256, 7168, 256, FP8), 8),
    "Qwen3-30B-A3B": (experts_of(128, 2048, 768), 8),
    "Mixtral-8x7B": (experts_of(8, 4096, 14336), 2),
    "gpt-oss-20b": (experts_of(32, 2880, 2880), 4),
}
EACH_MODEL = pytest.mark.parametrize(("experts", "top_k"), MODELS.values(), ids=MODELS)


@EACH_MODEL
@pytest.mark.parametrize("num_tokens", [1, 127, 2048, 16384, 16385, 100_000])
def test_chunks_hold_each_token_once_within_half_a_gigabyte(experts, top_k, num_tokens):
    chunks = list(token_chunks(num_tokens, top_k=top_k, itemsize=2, experts=experts))
    tokens = [token for chunk in chunks for token in range(chunk.start, chunk.stop)]
    assert tokens == list(range(num_tokens))
    longest = max(chunk.stop - chunk.start for chunk in chunks)
    needed = scratch_bytes(longest, top_k=top_k, itemsize=2, experts=experts)
    assert needed <= MOST_SCRATCH_BYTES < 500_000_000


@EACH_MODEL
def test_tokens_that_fit_are_one_chunk(experts, top_k):
    each = scratch_bytes(1, top_k=top_k, itemsize=2, experts=experts)
    fitting = MOST_SCRATCH_BYTES // each // 128 * 128
    for num_tokens in (1, 64, fitting):
        chunks = token_chunks(num_tokens, top_k=top_k, itemsize=2, experts=experts)
        assert list(chunks) == [slice(0, num_tokens)]


@EACH_MODEL
def test_each_chunk_begins_at_an_aligned_address(experts, top_k):
    chunks = token_chunks(70_001, top_k=top_k, itemsize=2, experts=experts)
    assert not any(chunk.start % 128 for chunk in chunks)


PROGRAM = """
from weakref import finalize
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tests.support.absent_hopper import pretend
pretend()
torch.use_deterministic_algorithms(mode=False)
from models.number_formats import FP8
from models.operands.experts import ExpertWeights
from models.kernels.experts.moe import apply_experts
from tests.support.kernel_launches import absent_gpu

class Held(TorchDispatchMode):
    now = most = 0

    def __init__(self):
        super().__init__()
        self.known = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            storage = x.untyped_storage()
            if storage._cdata not in self.known and storage.nbytes():
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                finalize(storage, self.free, storage._cdata, storage.nbytes())
        return result

    def free(self, key, size):
        self.known.discard(key)
        self.now -= size

NUM_TOKENS, TOP_K, HIDDEN, INNER = 16384, 8, 7168, 2048
hidden = torch.empty(NUM_TOKENS, HIDDEN, dtype=torch.bfloat16)
weights = torch.empty(NUM_TOKENS, TOP_K)
ids = torch.empty(NUM_TOKENS, TOP_K, dtype=torch.int32)
with absent_gpu() as launched:
    for dtype in (FP8, torch.bfloat16):
        # Kernels do not run, so nothing touches the memory of these.
        scale = torch.empty(2, 1, 1) if dtype == FP8 else None
        experts = ExpertWeights(
            gate_up=torch.empty(2, 2 * INNER, HIDDEN, dtype=dtype), gate_up_scale=scale,
            down=torch.empty(2, HIDDEN, INNER, dtype=dtype), down_scale=scale,
        )
        launched.clear()
        with Held() as held:
            given = (hidden, weights, ids, experts.gate_up, experts.down)
            held.known = {x.untyped_storage()._cdata for x in given}
            output = apply_experts(hidden, weights, ids, experts)
            scratch = held.most - output.numel() * output.itemsize
        assert launched.count("_sum_kernel") > 1
        assert 200e6 < scratch < 500e6, scratch
"""


@pytest.mark.slow
def test_16384_tokens_of_deepseek_v3_need_under_half_a_gigabyte():
    run_building(PROGRAM)
