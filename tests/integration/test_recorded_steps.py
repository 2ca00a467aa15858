"""Steps that an engine ran in November 2026 come out the same, token for token.

Both recordings are of `octavo record` beside an engine on a CPU at level 0, with 24 tokens a step,
graphs of 1, 2 and 4 decodes and of 8 and 16 tokens. Four clients sent greedy and random requests
with penalties, biases, log-probabilities and common prefixes, and let some of them go.

- without_drafts: the embedded model, `--cudagraph-mode full`; recorded again at 25e42de, before
  layers became plain, with the weights that know tools.
- with_drafts: the model of `write_draft_checkpoint(folder, agreement=0.98)` with
  drafting_config.json, `--cudagraph-mode full_and_piecewise --num-speculative-tokens 2`.
"""

import shutil
from pathlib import Path

import pytest
import torch

from services.engine.config.checkpoint import TINY_CHECKPOINT
from services.engine.replay.command import replay
from services.engine.replay.config import ReplayConfig
from tests.support.draft_checkpoints import write_draft_checkpoint

RECORDED = Path(__file__).parents[1] / "support" / "recorded"
NUM_STEPS = 100


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    drafting = tmp_path_factory.mktemp("drafting")
    write_draft_checkpoint(drafting, agreement=0.98)
    # The file of transformers names its version, and a recording belongs to one config.json.
    shutil.copy(RECORDED / "drafting_config.json", drafting / "config.json")
    return {"without_drafts": TINY_CHECKPOINT, "with_drafts": drafting}


@pytest.mark.parametrize("against", ["eager", "full", "piecewise"])
@pytest.mark.parametrize("name", ["without_drafts", "with_drafts"])
def test_every_step_brings_the_recorded_tokens(models, name, against):
    report = []
    config = ReplayConfig.from_flags(
        trace=RECORDED / f"{name}.binpb",
        model=models[name],
        against=against,
        device="cpu",
        compilation_level=0,
    )
    totals = replay(config, report.append)
    assert (totals.num_steps, totals.is_clean) == (NUM_STEPS, True), report
    if against == "eager":
        assert totals.num_exact == NUM_STEPS
    else:
        assert totals.num_by_graph == NUM_STEPS


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
