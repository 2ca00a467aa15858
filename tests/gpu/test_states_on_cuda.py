"""Models whose layers keep states on a GPU: graphs, snapshots and preemption change no token."""

import pytest
import torch

from models.cudagraph_mode import CUDAGraphMode
from models.layers.latent_attention import LatentAttention
from models.loading.loader import load_model
from services.engine.batch import read_int32
from services.engine.config.compilation_level import CompilationLevel
from tests.support.compilation import compilation_config
from tests.support.graph_engine import GraphEngine
from tests.support.guessed_drafts import GuessedDrafts
from tests.support.invariance import batch_invariance
from tests.support.mtp_checkpoints import write_mtp_checkpoint
from tests.support.random_checkpoints import write_checkpoint
from tests.support.state_variants import STATE_VARIANTS

pytestmark = pytest.mark.gpu

LONG = [(7 * i * i + 3 * i + 11) % 90 for i in range(200)]
PROMPTS = [LONG[:3], LONG[:100], LONG[50:115], LONG[:70] + LONG[120:150], LONG[5:6], LONG[:130]]
NUM_OUTPUT = 24
EAGER = compilation_config(cudagraph_mode=CUDAGraphMode.NONE)
GRAPHS = compilation_config(
    cudagraph_mode=CUDAGraphMode.FULL,
    cudagraph_capture_sizes=(2, 4, 8, 64),
)
COMPILED = compilation_config(
    level=CompilationLevel.PIECEWISE,
    use_inductor=False,
    cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
    cudagraph_capture_sizes=(2, 4, 8, 64),
)
COMPILED_WHOLE = compilation_config(
    level=CompilationLevel.PIECEWISE,
    use_inductor=False,
    cudagraph_mode=CUDAGraphMode.FULL,
    cudagraph_capture_sizes=(2, 4, 8, 64),
)
SIZES = {
    "max_model_len": 256, "block_size": 16, "num_blocks": 400, "max_num_batched_tokens": 256,
    "device": "cuda",
}  # fmt: skip
DRAFTS = {"num_speculative_tokens": 3, "min_speculative_tokens": 3}
DECODES = compilation_config(
    cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY, cudagraph_capture_sizes=(2, 4, 8)
)


DRAFTED = [name for name in sorted(STATE_VARIANTS) if not name.startswith("mamba2")]
"""Variants with keys, among whose blocks those of a small draft model are."""
OF_DRAFTED = pytest.mark.parametrize("folder", DRAFTED, indirect=True)


@pytest.fixture(scope="module", params=sorted(STATE_VARIANTS))
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, request.param, max_position_embeddings=256)
    return folder


@pytest.fixture(scope="module")
def expected(folder):
    """The outputs of a CPU, each prompt in an engine of its own."""
    sizes = SIZES | {"device": "cpu"}
    outputs = []
    for prompt in PROMPTS:
        outputs += GraphEngine(folder, EAGER, **sizes).run([prompt], NUM_OUTPUT)
    return outputs


@pytest.mark.parametrize("config", [EAGER, GRAPHS, COMPILED], ids=["eager", "graphs", "compiled"])
def test_float32_tokens_are_those_of_the_cpu(folder, expected, config, tmp_path):
    config = config.model_copy(update={"compile_cache_dir": tmp_path})
    engine = GraphEngine(folder, config, **SIZES)
    engine.capture()
    assert engine.run(PROMPTS, NUM_OUTPUT) == expected
    assert engine.run(PROMPTS, NUM_OUTPUT) == expected
    assert engine.scheduler.counts.cached_tokens >= 3 * 64
    assert engine.faults == []


@pytest.mark.parametrize("config", [GRAPHS, COMPILED_WHOLE], ids=["as written", "compiled"])
def test_decodes_and_mixed_steps_run_in_whole_graphs(folder, config, tmp_path):
    config = config.model_copy(update={"compile_cache_dir": tmp_path})
    engine = GraphEngine(folder, config, **SIZES | {"dtype": torch.bfloat16})
    assert [str(each.fault) for each in engine.capture() if each.fault] == []
    # Even the first chunks of latent attention read the cache.
    has_latents = any(isinstance(each, LatentAttention) for each in engine.model.modules())
    expected = CUDAGraphMode.FULL_AND_PIECEWISE if has_latents else CUDAGraphMode.FULL
    assert engine.prepared.mode is expected, engine.prepared.choice.reason
    engine.run([LONG[:3], LONG[:40], LONG[5:6]], NUM_OUTPUT)
    assert all(step.HasField("graph_key") for step, _ in engine.steps)
    assert len({step.graph_key.kind for step, _ in engine.steps}) == 2


def test_few_blocks_cost_preemptions_and_no_token(folder, expected):
    pages = GraphEngine(folder, EAGER, **SIZES).limits.num_state_blocks
    sizes = SIZES | {"num_blocks": 1 + 10 + 3 * pages, "max_num_batched_tokens": 40}
    engine = GraphEngine(folder, EAGER, **sizes)
    assert engine.run(PROMPTS, NUM_OUTPUT) == expected
    assert engine.run(PROMPTS, NUM_OUTPUT) == expected


@pytest.mark.parametrize("max_num_batched_tokens", [23, 256])
def test_batch_invariant_logprobs_of_a_resumed_request_have_the_bits_of_a_cold_one(
    folder, max_num_batched_tokens
):
    def logprobs(engine):
        engine.run([LONG[:130]], 8, logprobs=5)
        results = [result for _, result in engine.steps if result.logprobs]
        return [result.logprobs for result in results], [r.token_ids for r in results]

    sizes = SIZES | {"max_num_batched_tokens": max_num_batched_tokens, "dtype": torch.bfloat16}
    with batch_invariance():
        cold = logprobs(GraphEngine(folder, EAGER, **sizes))
        warm = GraphEngine(folder, EAGER, **sizes)
        warm.run([LONG[:110], LONG[:90]], 30)
        warm.steps.clear()
        assert logprobs(warm) == cold
        assert warm.scheduler.counts.cached_tokens >= 64


def drafting(folder, outputs, config, **sizes):
    """Returns an engine whose drafts are right two times in three."""
    sizes = SIZES | DRAFTS | sizes
    dtype = sizes.get("dtype", torch.float32)
    model = load_model(folder, device=torch.device("cuda"), dtype=dtype)
    sequences = [prompt + output for prompt, output in zip(PROMPTS, outputs, strict=True)]
    drafts = GuessedDrafts(model, sequences, max_model_len=SIZES["max_model_len"])
    model.draft_models = (drafts,)
    return GraphEngine(folder, config, model=model, **sizes)


def num_accepted(engine):
    return sum(int(read_int32(r.num_accepted_tokens).sum()) for _, r in engine.steps)


@OF_DRAFTED
@pytest.mark.parametrize("config", [EAGER, DECODES, COMPILED], ids=["eager", "graphs", "compiled"])
def test_drafts_change_no_token(folder, expected, config, tmp_path):
    config = config.model_copy(update={"compile_cache_dir": tmp_path})
    engine = drafting(folder, expected, config)
    engine.capture()
    for _ in range(2):
        assert engine.run(PROMPTS, NUM_OUTPUT) == expected
    if engine.limits.num_state_blocks:
        assert engine.scheduler.counts.cached_tokens >= 3 * 64
    assert num_accepted(engine) > NUM_OUTPUT
    assert engine.faults == []


@OF_DRAFTED
def test_drafts_with_few_blocks_change_no_token(folder, expected):
    pages = drafting(folder, expected, EAGER).limits.num_state_blocks
    sizes = {"num_blocks": 1 + 16 + pages * 7 // 4, "max_num_batched_tokens": 40}
    engine = drafting(folder, expected, DECODES, **sizes)
    engine.capture()
    for _ in range(2):
        assert engine.run(PROMPTS, NUM_OUTPUT) == expected


@pytest.mark.parametrize("variant", ["qwen3_next", "qwen3_5_odd", "qwen3_5_moe"])
def test_the_models_own_draft_layer_changes_no_token(tmp_path, variant):
    write_mtp_checkpoint(tmp_path, variant, agreement=0.98, max_position_embeddings=256)
    alone = GraphEngine(tmp_path, EAGER, **SIZES).run(PROMPTS, NUM_OUTPUT)
    engine = GraphEngine(tmp_path, DECODES, **SIZES, **DRAFTS)
    engine.capture()
    for _ in range(2):
        assert engine.run(PROMPTS, NUM_OUTPUT) == alone
    assert num_accepted(engine) > NUM_OUTPUT
    assert any(result.drafted_by_graph for _, result in engine.steps)
    assert engine.faults == []


@OF_DRAFTED
def test_batch_invariant_logprobs_after_drafts_have_the_bits_of_those_without(folder):
    def logprobs(engine):
        [output] = engine.run([LONG[:100]], NUM_OUTPUT, logprobs=5)
        values = b"".join(result.logprobs for _, result in engine.steps if result.logprobs)
        return output, values[: 4 * len(output)]  # accepted past the end, too

    dtype = {"dtype": torch.bfloat16}
    with batch_invariance():
        cold = logprobs(GraphEngine(folder, EAGER, **SIZES, **dtype))
        outputs = [[0] for _ in PROMPTS]
        outputs[1] = cold[0]
        warm = drafting(folder, outputs, EAGER, **dtype)
        warm.run([LONG[:110], LONG[:90]], 30)
        warm.steps.clear()
        assert logprobs(warm) == cold
        assert num_accepted(warm) > 5
