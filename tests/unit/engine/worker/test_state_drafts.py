"""Drafts of models whose layers keep states: the tokens and bits of an engine without drafts."""

import pytest
import torch

from models.cudagraph_mode import CUDAGraphMode
from models.loading.loader import load_model
from services.engine.batch import read_int32
from tests.support.compilation import compilation_config
from tests.support.graph_engine import GraphEngine
from tests.support.guessed_drafts import GuessedDrafts
from tests.support.invariance import batch_invariance
from tests.support.mtp_checkpoints import write_mtp_checkpoint
from tests.support.random_checkpoints import write_checkpoint
from tests.support.state_variants import STATE_VARIANTS

CPU = torch.device("cpu")
LONG = [(7 * i * i + 3 * i + 11) % 90 for i in range(200)]
PROMPTS = [LONG[:3], LONG[:100], LONG[50:115], LONG[:70] + LONG[120:150], LONG[5:6], LONG[:130]]
NUM_OUTPUT = 64
EAGER = compilation_config(cudagraph_mode=CUDAGraphMode.NONE)
GRAPHS = compilation_config(
    cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY, cudagraph_capture_sizes=(2, 4, 8)
)
SIZES = {"max_model_len": 256, "block_size": 16, "num_blocks": 600, "max_num_batched_tokens": 256}
BY_DEFAULT = ("granite_hybrid", "lfm2", "qwen3_5_odd")
LOOKUP = {"lookup_sizes": (1, 2)}


@pytest.fixture(
    scope="module",
    params=[
        name if name in BY_DEFAULT else pytest.param(name, marks=pytest.mark.families)
        for name in sorted(STATE_VARIANTS)
        # No state, and no keys, among whose blocks those of a small draft model are.
        if name not in ("granite_hybrid_dense", "mamba2", "mamba2_odd")
    ],
)
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, request.param, max_position_embeddings=256)
    return folder


@pytest.fixture(scope="module")
def expected(folder):
    """The outputs without drafts."""
    return GraphEngine(folder, EAGER, **SIZES).run(PROMPTS, NUM_OUTPUT)


def engine_of(folder, expected, config=EAGER, *, k=3, seed=0, dtype=torch.float32, **sizes):
    """Returns an engine whose drafts are right two times in three."""
    model = load_model(folder, device=CPU, dtype=dtype)
    model.draft_models = (
        GuessedDrafts(
            model,
            [prompt + output for prompt, output in zip(PROMPTS, expected, strict=True)],
            max_model_len=SIZES["max_model_len"],
            seed=seed,
        ),
    )
    sizes = SIZES | {"num_speculative_tokens": k, "min_speculative_tokens": k} | sizes
    return GraphEngine(folder, config, model=model, dtype=dtype, **sizes)


def num_accepted(engine) -> list[int]:
    """Accepted drafts of each verification so far."""
    return [each for _, result in engine.steps for each in read_int32(result.num_accepted_tokens)]


@pytest.mark.parametrize("config", [EAGER, GRAPHS], ids=["eager", "graphs"])
@pytest.mark.parametrize("drafts", [{}, LOOKUP], ids=["guessed", "lookup"])
def test_drafts_change_no_token(folder, expected, config, drafts, tmp_path):
    config = config.model_copy(update={"compile_cache_dir": tmp_path})
    engine = engine_of(folder, expected, config, **drafts)
    engine.capture()
    for _ in range(2):  # then from the snapshots of before
        assert engine.run(PROMPTS, NUM_OUTPUT) == expected
    assert engine.scheduler.counts.cached_tokens >= 3 * 64
    accepted = num_accepted(engine)
    assert min(accepted) == 0 < max(accepted)
    assert engine.faults == []
    assert engine.scheduler.num_free_blocks == SIZES["num_blocks"] - 1


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("max_num_batched_tokens", [11, 37])
def test_drafts_beside_chunks_of_prompts_change_no_token(
    folder, expected, k, max_num_batched_tokens
):
    sizes = {"max_num_batched_tokens": max_num_batched_tokens}
    engine = engine_of(folder, expected, k=k, seed=k, **sizes)
    for _ in range(2):
        assert engine.run(PROMPTS, NUM_OUTPUT) == expected


@pytest.mark.parametrize("drafts", [{}, LOOKUP], ids=["guessed", "lookup"])
def test_drafts_with_few_blocks_cost_preemptions_and_no_token(folder, expected, drafts):
    pages = engine_of(folder, expected).limits.num_state_blocks
    sizes = {"num_blocks": 1 + 16 + pages * 7 // 4, "max_num_batched_tokens": 40}
    engine = engine_of(folder, expected, **sizes, **drafts)
    for _ in range(2):
        assert engine.run(PROMPTS, NUM_OUTPUT) == expected
    assert engine.scheduler.num_free_blocks == sizes["num_blocks"] - 1


def test_a_later_turn_starts_from_an_output_with_drafts(folder, expected):
    engine = engine_of(folder, expected)
    prompt, output = PROMPTS[1], expected[1]
    assert engine.run([prompt], NUM_OUTPUT) == [output]
    turn = prompt + output + LONG[:9]
    [again] = engine.run([turn], 8)
    assert engine.scheduler.counts.cached_tokens == 128
    assert GraphEngine(folder, EAGER, **SIZES).run([turn], 8) == [again]


@pytest.mark.parametrize("variant", ["qwen3_5_odd", "qwen3_5_moe"])
@pytest.mark.parametrize("config", [EAGER, GRAPHS], ids=["eager", "graphs"])
def test_the_models_own_draft_layer_changes_no_token(tmp_path, variant, config):
    config = config.model_copy(update={"compile_cache_dir": tmp_path / "compiled"})
    write_mtp_checkpoint(tmp_path, variant, agreement=0.98, max_position_embeddings=256)
    alone = GraphEngine(tmp_path, EAGER, **SIZES).run(PROMPTS, NUM_OUTPUT)
    sizes = SIZES | {"num_speculative_tokens": 2, "min_speculative_tokens": 2}
    engine = GraphEngine(tmp_path, config, **sizes)
    engine.capture()
    for _ in range(2):
        assert engine.run(PROMPTS, NUM_OUTPUT) == alone
    accepted = num_accepted(engine)
    assert min(accepted) == 0 < max(accepted)
    assert sum(accepted) > len(accepted) / 8
    assert engine.faults == []


def test_batch_invariant_logits_after_drafts_have_the_bits_of_those_without(folder):
    def logprobs(engine):
        [output] = engine.run([LONG[:100]], 40, logprobs=5)
        results = [result for _, result in engine.steps if result.logprobs]
        values = b"".join(result.logprobs for result in results)
        return output, values[: 4 * len(output)]  # accepted past the end, too

    with batch_invariance():
        sizes = SIZES | {"dtype": torch.bfloat16}
        cold = logprobs(GraphEngine(folder, EAGER, **sizes))
        sequences = [[*prompt, 0] for prompt in PROMPTS]
        sequences[1] = LONG[:100] + cold[0]
        outputs = [each[len(p) :] for each, p in zip(sequences, PROMPTS, strict=True)]
        warm = engine_of(folder, outputs, dtype=torch.bfloat16)
        warm.run([LONG[:110], LONG[:90]], 30)
        warm.steps.clear()
        assert logprobs(warm) == cold
        assert warm.scheduler.counts.cached_tokens >= 64
        assert sum(num_accepted(warm)) > 10
