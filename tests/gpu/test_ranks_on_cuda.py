"""Two ranks, each on a GPU of its own, with NCCL inside CUDA graphs."""

import pytest

from tests.support.random_checkpoints import write_checkpoint
from tests.support.ranks_core import ranks_config, ranks_core
from tests.support.step_driver import sampling

pytestmark = pytest.mark.gpu(2)

PROMPTS = [[5, 17, 3], [40, 41, 42, 43, 44, 45, 46, 47, 48], [9], [5, 17, 3, 8]]
SHAPE = {"hidden_size": 512, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 8}


@pytest.mark.parametrize("while_serving", [False, True], ids=["at start", "while serving"])
@pytest.mark.parametrize("level", [0, 2, 3])
async def test_two_gpus_give_the_tokens_of_one(tmp_path, level, while_serving):
    write_checkpoint(tmp_path, "qwen3", **SHAPE)
    outputs = []
    for size in (1, 2):
        config = ranks_config(
            tmp_path,
            device="cuda",
            dtype="float32",
            block_size=16,
            num_kv_blocks=None,
            gpu_memory_utilization=0.2,
            tensor_parallel_size=size,
            compilation_level=level,
            capture_while_serving=while_serving,
            cudagraph_mode="full_and_piecewise",
            cudagraph_capture_sizes=[1, 2, 4],
            compile_cache_dir=tmp_path / "cache",
        )
        async with ranks_core(config) as ranks:
            for _ in range(3):
                tokens = await ranks.generate(PROMPTS, sampling(max_tokens=24))
            graphs = ranks.core.stats().graphs
            assert [each.device for each in ranks.core.worker.ranks] == [
                f"cuda:{rank}" for rank in range(size)
            ]
        assert not any(figures.fault for figures in graphs.figures)
        outputs.append(tokens)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("level", [0, 3])
async def test_whole_experts_give_the_tokens_of_one_gpu_and_move(tmp_path, family, level):
    write_checkpoint(tmp_path, family)
    outputs = []
    for size in (1, 2):
        whole = {"enable_expert_parallel": True, "num_redundant_experts": 2, "eplb_interval": 8}
        config = ranks_config(
            tmp_path,
            device="cuda",
            dtype="float32",
            block_size=16,
            num_kv_blocks=None,
            gpu_memory_utilization=0.2,
            tensor_parallel_size=size,
            compilation_level=level,
            cudagraph_mode="full_and_piecewise",
            cudagraph_capture_sizes=[1, 2, 4],
            compile_cache_dir=tmp_path / "cache",
            **(whole if size > 1 else {}),
        )
        async with ranks_core(config) as ranks:
            for _ in range(4):
                tokens = await ranks.generate(PROMPTS, sampling(max_tokens=24))
            stats = ranks.core.stats()
            figures = await ranks.core.expert_figures()
        assert not any(each.fault for each in stats.graphs.figures)
        outputs.append(tokens)
    assert outputs[0] == outputs[1]
    assert stats.counters.num_expert_moves > 0
    assert all(sum(layer.expert_load) for layer in figures)
