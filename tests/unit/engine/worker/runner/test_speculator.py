"""Speculation through the real scheduler and the real runner."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from models.cudagraph_mode import CUDAGraphMode
from models.deepseek_mtp import DeepseekMTP
from models.forward_context import forward_context
from services.engine.batch import read_int32
from services.engine.limits import StepLimits
from services.engine.request import RequestStatus
from services.engine.worker.runner.speculator import Speculation
from services.engine.worker.start.kv_memory import probe_runner
from services.engine.worker.start.warm_up import largest_step, run_small_steps
from tests.support.compilation import compilation_config
from tests.support.draft_checkpoints import write_draft_checkpoint
from tests.support.graph_engine import GraphEngine
from tests.support.paged_runner import PagedRunner
from tests.support.requests import make_request

PROMPTS = [[5, 17, 3], [44, 2, 9, 9, 31, 60, 7, 8, 1, 90], [12], [6, 17, 3, 8, 8], [70] * 17]
NUM_OUTPUT = 20
LIMITS = StepLimits(
    max_num_seqs=4,
    max_num_batched_tokens=24,
    max_model_len=32,
    block_size=4,
    vocab_size=97,
    num_speculative_tokens=3,
)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("checkpoint")
    write_draft_checkpoint(folder, agreement=0.98)
    return folder


def engine(folder, num_speculative_tokens, config=None, **options):
    return GraphEngine(
        folder,
        config or compilation_config(),
        num_speculative_tokens=num_speculative_tokens,
        **options,
    )


@pytest.fixture(scope="module")
def plain(folder):
    return engine(folder, 0)


def num_accepted(engine):
    return sum(int(read_int32(r.num_accepted_tokens).sum()) for _, r in engine.steps)


@pytest.mark.parametrize("num_speculative_tokens", [1, 2, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_are_those_of_a_run_without(folder, plain, num_speculative_tokens, temperature):
    num_plain_steps = len(plain.steps)
    expected = plain.run(PROMPTS, NUM_OUTPUT, temperature=temperature)
    speculating = engine(folder, num_speculative_tokens)
    assert speculating.run(PROMPTS, NUM_OUTPUT, temperature=temperature) == expected
    assert num_accepted(speculating) > 0
    assert len(speculating.steps) < len(plain.steps) - num_plain_steps


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 7},
        {"num_blocks": 14, "max_num_batched_tokens": 16},
        {"max_num_seqs": 2},
        {"max_model_len": 24, "num_blocks": 7},
    ],
    ids=str,
)
def test_chunks_preemptions_and_full_sequences_change_nothing(folder, options):
    expected = engine(folder, 0, **options).run(PROMPTS, NUM_OUTPUT)
    speculating = engine(folder, 3, **options)
    assert speculating.run(PROMPTS, NUM_OUTPUT) == expected
    assert num_accepted(speculating) > 0


def test_two_draft_layers_change_nothing_either(tmp_path):
    write_draft_checkpoint(tmp_path, num_draft_layers=2, agreement=0.98)
    expected = engine(tmp_path, 0).run(PROMPTS, NUM_OUTPUT)
    speculating = engine(tmp_path, 3)
    assert speculating.run(PROMPTS, NUM_OUTPUT) == expected
    assert num_accepted(speculating) > 0


@pytest.mark.parametrize("variant", ["deepseek_v32", "glm4_moe", "glm4_moe_groups"])
def test_other_attention_changes_nothing_either(tmp_path, variant):
    write_draft_checkpoint(tmp_path, variant, agreement=0.98)
    expected = engine(tmp_path, 0).run(PROMPTS, NUM_OUTPUT)
    speculating = engine(tmp_path, 2)
    assert speculating.run(PROMPTS, NUM_OUTPUT) == expected
    assert num_accepted(speculating) > 0


def test_steps_that_verify_run_in_pieces_too(folder, plain):
    config = compilation_config(
        cudagraph_mode=CUDAGraphMode.PIECEWISE, cudagraph_capture_sizes=(8, 16, 64)
    )
    speculating = engine(folder, 2, config)
    assert [outcome.fault for outcome in speculating.capture()] == [""] * 3
    assert speculating.run(PROMPTS, NUM_OUTPUT) == plain.run(PROMPTS, NUM_OUTPUT)
    assert set(speculating.reasons) == {0}


class Reference:
    """Drafts from a sequence's tokens alone, all of it computed again."""

    def __init__(self, model):
        self._model = model
        self._layers = DeepseekMTP(model)

    def drafts(self, token_ids, num_drafts):
        """Returns the guess of one draft layer for the token after a sequence."""
        *known, newest = token_ids
        hidden = self._run(known, self._model)
        following, made = [*known[1:], newest], []
        for _ in range(num_drafts):
            draft = partial(self._layers, torch.tensor(following), hidden=hidden, depth=0)
            out = self._run(following, lambda _, at, draft=draft: draft(at))
            made.append(int(self._layers.compute_logits(out[-1:], 0).argmax()))
            hidden = torch.cat((hidden, out[-1:]))
            following.append(made[-1])
        return made

    def _run(self, token_ids, compute):
        runner = PagedRunner(self._model)
        sequence = runner.add(token_ids)
        runner._grow(sequence, len(token_ids))
        input_ids, context = runner.prepare([(sequence, len(token_ids))])
        with forward_context(context), torch.inference_mode():
            return compute(input_ids, context.context.positions)


@pytest.mark.parametrize("options", [{}, {"num_blocks": 16, "max_num_batched_tokens": 9}], ids=str)
def test_drafts_depend_on_known_tokens_alone_whatever_was_guessed_before(folder, options):
    speculating = engine(folder, 3, **options)
    scheduler, runner = speculating.scheduler, speculating.runner
    requests = [make_request(prompt, max_tokens=12) for prompt in PROMPTS]
    for request in requests:
        scheduler.add(request)
    made = {}
    while scheduler.has_work:
        step = scheduler.schedule()
        scheduler.update(step, runner.execute(step.descriptor).message())
        made |= {
            tuple(request.token_ids): request.draft_token_ids
            for request in step.requests
            if request.status is RequestStatus.RUNNING
        }
    assert len(made) > 20
    reference = Reference(speculating.model)
    expected = {key: reference.drafts(list(key), len(made[key])) for key in made}
    assert made == expected


def test_a_step_of_another_number_of_drafts_is_refused(folder):
    speculating, other = engine(folder, 2), engine(folder, 3)
    speculating.scheduler.add(make_request([1, 2, 3]))
    descriptor = speculating.scheduler.schedule().descriptor
    with pytest.raises(ValueError, match="num_spec_steps 2, not 3"):
        other.runner.execute(descriptor)


def test_the_largest_step_drafts_too(folder):
    model = engine(folder, 1).model
    runner = probe_runner(model, limits=LIMITS, dtype=torch.float32, device=CPU)
    assert isinstance(runner.speculator, Speculation)
    step = largest_step(LIMITS)
    # Memory that grows with the longest sequence is measured, too.
    assert step.attn_metadata.max_seqlen_k == LIMITS.max_model_len - LIMITS.decode_q_len
    assert step.context.num_tokens == LIMITS.max_num_batched_tokens
    result = runner.execute(step).message()
    num_rows = LIMITS.max_num_seqs
    assert len(read_int32(result.draft_token_ids)) == num_rows * LIMITS.num_speculative_tokens
    assert read_int32(result.num_accepted_tokens).tolist() == [0] * num_rows


def test_dummy_steps_draft(folder):
    model = engine(folder, 1).model
    runner = probe_runner(model, limits=LIMITS, dtype=torch.float32, device=CPU)
    run_small_steps(runner, LIMITS, [(1,), (5, 1)])
    assert isinstance(runner.speculator, Speculation)


def test_the_largest_batch_of_decodes_leaves_room_for_drafts():
    assert (LIMITS.decode_q_len, LIMITS.max_decodes) == (4, 4)
    assert replace(LIMITS, max_num_batched_tokens=11).max_decodes == 2
    assert replace(LIMITS, num_speculative_tokens=0).max_decodes == 4
