"""Two ranks, each on a GPU of its own, that communicate inside and between CUDA graphs."""

import pytest

from services.engine.batch import GraphKind
from tests.support.adapter_engine import AdapterCase
from tests.support.draft_checkpoints import write_draft_checkpoint
from tests.support.random_checkpoints import write_checkpoint
from tests.support.ranks_core import ranks_config, ranks_core
from tests.support.step_driver import sampling

pytestmark = pytest.mark.gpu(2)

PROMPTS = [[5, 17, 3], [40, 41, 42, 43, 44, 45, 46, 47, 48], [9], [5, 17, 3, 8]]
DRAFTS = {"num_speculative_tokens": 3, "min_speculative_tokens": 3}
SHAPE = {"hidden_size": 512, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 8}


async def generated(folder, *, prompts=PROMPTS, num_rounds=3, **flags):
    """Returns the tokens of each round, the figures, and those of experts; no graph is at fault."""
    config = ranks_config(
        folder,
        device="cuda",
        block_size=16,
        cudagraph_mode="full_and_piecewise",
        cudagraph_capture_sizes=[1, 2, 4],
        compile_cache_dir=folder / "cache",
        **{"dtype": "float32", **flags},
    )
    async with ranks_core(config) as ranks:
        rounds = [await ranks.generate(prompts, sampling(max_tokens=24)) for _ in range(num_rounds)]
        stats = ranks.core.stats()
        experts = await ranks.core.expert_figures()
        devices = [each.device for each in ranks.core.worker.ranks]
    assert devices == [f"cuda:{rank}" for rank in range(config.parallel.num_ranks)]
    assert not any(figures.fault for figures in stats.graphs.figures)
    return rounds, stats, experts


@pytest.mark.parametrize("while_serving", [False, True], ids=["at start", "while serving"])
@pytest.mark.parametrize("level", [0, 2, 3])
@pytest.mark.parametrize("flag", ["tensor_parallel_size", "pipeline_parallel_size"])
async def test_two_gpus_give_the_tokens_of_one(tmp_path, flag, level, while_serving):
    write_checkpoint(tmp_path, "qwen3", num_hidden_layers=7, **SHAPE)
    flags = {"compilation_level": level, "capture_while_serving": while_serving}
    alone, _, _ = await generated(tmp_path, **flags)
    assert (await generated(tmp_path, **flags, **{flag: 2}))[0] == alone


async def test_graphs_of_many_requests_on_two_stages_pass_their_test(tmp_path):
    write_checkpoint(tmp_path, "qwen3", max_position_embeddings=256, **SHAPE)
    config = ranks_config(
        tmp_path,
        device="cuda",
        pipeline_parallel_size=2,
        dtype="bfloat16",
        block_size=16,
        num_kv_blocks=2000,
        max_model_len=256,
        max_num_seqs=128,
        max_num_batched_tokens=2048,
        cudagraph_capture_sizes=[1, 128],
        cudagraph_piece_sizes=[512, 2048],
        capture_while_serving=False,
    )
    async with ranks_core(config) as ranks:
        figures = ranks.core.stats().graphs.figures
    assert len(figures) > 4
    assert not any(each.fault for each in figures)


async def test_the_cache_has_the_blocks_of_the_rank_with_the_least_memory(tmp_path):
    # Two of these layers are few enough that other tests have memory left.
    write_checkpoint(tmp_path, "qwen3", **SHAPE)
    flags = {"num_kv_blocks": None, "dtype": "bfloat16", "tensor_parallel_size": 2}
    config = ranks_config(tmp_path, device="cuda", block_size=16, **flags)
    async with ranks_core(config) as ranks:
        worker = ranks.core.worker
        assert worker.num_blocks == min(each.num_blocks for each in worker.ranks) > 1000
        assert len(await ranks.generate(PROMPTS, sampling(max_tokens=24))) == len(PROMPTS)


@pytest.mark.parametrize("quantization", ["none", "fp8"])
@pytest.mark.parametrize("level", [0, 3])
async def test_the_fused_sum_serves_and_repeats_its_tokens(tmp_path, level, quantization):
    write_checkpoint(tmp_path, "qwen3", **SHAPE)
    flags = {"dtype": "bfloat16", "tensor_parallel_size": 2, "capture_while_serving": False}
    flags |= {"compilation_level": level, "enable_prefix_caching": False}
    flags |= {"quantization": quantization}
    rounds, _, _ = await generated(tmp_path, prompts=PROMPTS[1:2], all_reduce="fused", **flags)
    assert rounds[0] == rounds[1] == rounds[2]


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("level", [0, 3])
async def test_whole_experts_give_the_tokens_of_one_gpu_and_move(tmp_path, family, level):
    write_checkpoint(tmp_path, family)
    flags = {"compilation_level": level, "num_rounds": 4}
    alone, _, _ = await generated(tmp_path, **flags)
    whole = {"enable_expert_parallel": True, "num_redundant_experts": 2, "eplb_interval": 8}
    tokens, stats, experts = await generated(tmp_path, tensor_parallel_size=2, **flags, **whole)
    assert tokens == alone
    assert stats.counters.num_expert_moves > 0
    assert all(sum(layer.expert_load) for layer in experts)


@pytest.mark.parametrize("level", [0, 3])
@pytest.mark.parametrize(
    "sizes",
    [{"tensor_parallel_size": 2, "enable_expert_parallel": True}, {"data_parallel_size": 2}],
    ids=["experts", "data"],
)
async def test_whole_experts_apply_the_adapters_of_all_ranks_tokens(tmp_path, sizes, level):
    case = AdapterCase(tmp_path, "qwen3_moe", num_adapters=3, with_experts=True)
    names = ["a0", "a2", "a1", ""]
    expected = [case.expected(*each, 12) for each in zip(PROMPTS, names, strict=True)]
    config = ranks_config(
        case.base,
        device="cuda",
        dtype="float32",
        block_size=16,
        cudagraph_capture_sizes=[1, 2, 4],
        capture_while_serving=False,
        compilation_level=level,
        compile_cache_dir=tmp_path / "cache",
        **{**case.flags(), "max_loras": 2, **sizes},
    )
    async with ranks_core(config) as ranks:
        for _ in range(2):
            tokens = await ranks.generate(PROMPTS, sampling(max_tokens=12), adapters=names)
            assert tokens == expected
        assert not any(each.fault for each in ranks.core.stats().graphs.figures)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("level", [0, 3])
async def test_rows_of_data_parallel_ranks_travel_by_either_way(tmp_path, family, level):
    write_checkpoint(tmp_path, family)
    flags = {"compilation_level": level, "data_parallel_size": 2, "dtype": "bfloat16"}
    flags |= {"capture_while_serving": False, "enable_prefix_caching": False}
    # The sum of two ranks is the same in any order. One request, as others change a step's rows.
    tokens = [
        (await generated(tmp_path, prompts=PROMPTS[1:2], all_reduce=way, **flags))[0]
        for way in ("nccl", "fused")
    ]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("while_serving", [False, True], ids=["at start", "while serving"])
@pytest.mark.parametrize("level", [0, 3])
async def test_data_parallel_ranks_draft_and_give_the_tokens_of_one_gpu(
    tmp_path, level, while_serving
):
    write_draft_checkpoint(tmp_path, agreement=0.98)
    flags = {"compilation_level": level, "capture_while_serving": while_serving, **DRAFTS}
    alone, _, _ = await generated(tmp_path, **flags)
    tokens, stats, _ = await generated(tmp_path, data_parallel_size=2, **flags)
    assert tokens == alone
    assert stats.counters.drafts.num_accepted > 0
    replayed = {each.key.kind for each in stats.graphs.figures if each.num_replays}
    if not while_serving:
        assert GraphKind.GRAPH_KIND_DRAFT in replayed


@pytest.mark.gpu(4)
@pytest.mark.parametrize("level", [0, 3])
async def test_data_parallel_ranks_of_two_gpus_each_give_the_tokens_of_one(tmp_path, level):
    write_draft_checkpoint(tmp_path, agreement=0.98)
    flags = {"compilation_level": level, "num_rounds": 4, **DRAFTS}
    alone, _, _ = await generated(tmp_path, **flags)
    sizes = {"data_parallel_size": 2, "tensor_parallel_size": 2}
    tokens, stats, _ = await generated(tmp_path, eplb_interval=8, **sizes, **flags)
    assert tokens == alone
    assert stats.counters.num_expert_moves > 0


@pytest.mark.parametrize("level", [0, 3])
async def test_batch_invariant_data_parallel_ranks_repeat_their_bits(tmp_path, level):
    write_checkpoint(tmp_path, "qwen3_moe", hidden_size=256, head_dim=64)
    config = ranks_config(
        tmp_path,
        device="cuda",
        dtype="bfloat16",
        block_size=16,
        batch_invariant=True,
        data_parallel_size=2,
        compilation_level=level,
        cudagraph_capture_sizes=[1, 2, 4],
        capture_while_serving=False,
    )
    wanted = sampling(max_tokens=24, logprobs=2)

    async def outcomes(prompts):
        sinks = [ranks.submit(prompt, wanted) for prompt in prompts]
        for sink in sinks:
            assert (await sink.wait_for_end()).error is None
        return [[each for output in sink.outputs for each in output.logprobs] for sink in sinks]

    async with ranks_core(config) as ranks:
        alone = [(await outcomes([prompt]))[0] for prompt in PROMPTS]
        for order in (1, -1):
            assert await outcomes(PROMPTS[::order]) == alone[::order]
