"""Two steps in flight with drafts: no token of any request differs from one step in flight."""

import pytest
import torch

from models.cudagraph_mode import CUDAGraphMode
from services.engine.batch import read_int32
from tests.support.compilation import compilation_config
from tests.support.draft_checkpoints import write_draft_checkpoint
from tests.support.eagle3_checkpoints import write_eagle3_head
from tests.support.graph_engine import GraphEngine
from tests.support.random_checkpoints import write_checkpoint

SHARED = [44, 2, 9, 9, 31, 60, 7, 8]
PROMPTS = [[5, 17, 3], [*SHARED, 1, 90], [12], [*SHARED, 3, 8, 8], [70] * 17]
NUM_OUTPUT = 24
LAYERS = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
SAMPLING = [
    {},
    {"temperature": 0.8, "top_k": 20, "repetition_penalty": 1.4, "presence_penalty": 0.5},
    {"min_tokens": 9, "end_token_ids": frozenset(range(0, 97, 4))},
    {"logprobs": 2, "end_token_ids": frozenset(range(0, 97, 9)), "temperature": 1.0},
]
SIZES = [
    {},
    {"max_num_batched_tokens": 9},
    {"num_blocks": 16, "max_num_batched_tokens": 16},
    {"max_model_len": 26, "num_blocks": 9},
]


@pytest.fixture(scope="module", params=["draft_layers", "eagle3", "small_model"])
def source(request, tmp_path_factory):
    """The model's folder and the options of one way to draft."""
    torch.set_num_threads(1)
    folder, head = (tmp_path_factory.mktemp(name) for name in ("model", "head"))
    if request.param == "draft_layers":
        write_draft_checkpoint(folder, agreement=0.98)
        return folder, {}
    write_checkpoint(folder, "llama", num_hidden_layers=4)
    if request.param == "small_model":
        return folder, {"draft_model": folder}
    write_eagle3_head(head, folder, **LAYERS)
    return folder, {"draft_model": head}


def engine(source, max_in_flight, num_speculative_tokens=3, **options):
    folder, way = source
    config = compilation_config(
        cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY, cudagraph_capture_sizes=(2, 8)
    )
    return GraphEngine(
        folder,
        config,
        num_speculative_tokens=num_speculative_tokens,
        max_in_flight=max_in_flight,
        **(way if num_speculative_tokens else {}),
        **options,
    )


def num_carried(engine):
    """Returns how many requests were ordered before the result of their last step."""
    metadata = (step.spec_decode_metadata for step in engine.sent.values())
    return sum(len(read_int32(each.carried_requests)) for each in metadata)


@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
def test_every_sampling_gives_the_same_tokens(source, sampling):
    expected = engine(source, 2, 0).run(PROMPTS, NUM_OUTPUT, **sampling)
    waiting, carrying = engine(source, 1), engine(source, 2)
    carrying.capture(4)
    # The second time prompts are found in the prefix cache.
    for _ in range(2):
        assert waiting.run(PROMPTS, NUM_OUTPUT, **sampling) == expected
        assert carrying.run(PROMPTS, NUM_OUTPUT, **sampling) == expected
    assert not num_carried(waiting)
    assert num_carried(carrying) > NUM_OUTPUT


@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
def test_a_request_alone_has_the_same_tokens(source, sampling):
    expected = engine(source, 2, 0).run(PROMPTS[:1], NUM_OUTPUT, **sampling)
    assert engine(source, 2).run(PROMPTS[:1], NUM_OUTPUT, **sampling) == expected


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_chunks_preemptions_and_full_sequences_change_nothing(source, sizes):
    expected = engine(source, 2, 0, **sizes).run(PROMPTS, NUM_OUTPUT)
    carrying = engine(source, 2, **sizes)
    assert carrying.run(PROMPTS, NUM_OUTPUT) == expected
    assert num_carried(carrying)


def test_a_step_is_complete_once_its_result_is_back(source):
    carrying = engine(source, 2)
    carrying.run(PROMPTS, NUM_OUTPUT)
    again = engine(source, 1)
    for step, result in carrying.steps:
        assert not step.spec_decode_metadata.carried_requests
        repeated = again.runner.execute(step).message()
        assert repeated.token_ids == result.token_ids
        assert repeated.draft_token_ids == result.draft_token_ids


def test_requests_with_fewer_drafts_are_carried_too(source):
    for number in (0, 1):
        sampling = {"num_speculative_tokens": number, "temperature": 1.0}
        expected = engine(source, 2, 0).run(PROMPTS, NUM_OUTPUT, temperature=1.0)
        carrying = engine(source, 2)
        assert carrying.run(PROMPTS, NUM_OUTPUT, **sampling) == expected
        assert num_carried(carrying)
