"""Two pipeline stages, one after the other, compute what the whole model does."""

import pytest
import torch

from models.forward_context import forward_context
from models.loading.loader import load_model
from models.parallel.group import ParallelGroup, PipelineStage
from tests.support.paged_runner import PagedRunner
from tests.support.random_checkpoints import transformers_logits
from tests.support.recent_variants import RECENT_VARIANTS
from tests.support.tensor_parallel_rank import TOKEN_IDS

CPU = torch.device("cpu")
CHUNK = 4


def load_stages(folder, num_layers=()):
    return [
        load_model(
            folder,
            device=CPU,
            dtype=torch.float32,
            group=ParallelGroup(stage=PipelineStage(rank=rank, size=2, num_layers=num_layers)),
        )
        for rank in range(2)
    ]


def run_stages(models):
    """Returns the logits of TOKEN_IDS, computed in chunks, each by one stage after the other."""
    runners = [PagedRunner(model) for model in models]
    sequences = [runner.add(TOKEN_IDS) for runner in runners]
    pieces = []
    for start in range(0, len(TOKEN_IDS), CHUNK):
        size = min(CHUNK, len(TOKEN_IDS) - start)
        hidden = None
        for runner, sequence in zip(runners, sequences, strict=True):
            runner._grow(sequence, start + size)
            input_ids, context = runner.prepare([(sequence, size)])
            with forward_context(context), torch.inference_mode():
                given = input_ids if hidden is None else hidden
                hidden = runner.model(given, context.context.positions)
            sequence.num_cached += size
        with torch.inference_mode():
            pieces.append(models[-1].compute_logits(hidden))
    return torch.cat(pieces)


@pytest.mark.parametrize(
    "variant",
    [
        "glm_moe_dsa_shared",
        *(
            pytest.param(name, marks=pytest.mark.families)
            for name in RECENT_VARIANTS
            if name not in ("glm_moe_dsa_shared", "gemma4_shared")
        ),
    ],
)
def test_two_stages_give_the_logits_of_transformers(checkpoint, variant):
    folder, reference = checkpoint(variant)
    # The third layer of the one of five has an indexer.
    is_shared = variant == "glm_moe_dsa_shared"
    models = load_stages(folder, (2, 3) if is_shared else ())
    expected = transformers_logits(reference, TOKEN_IDS)
    torch.testing.assert_close(run_stages(models), expected, rtol=1e-4, atol=1e-4)


def test_a_stage_that_would_lack_an_indexer_s_choice_is_refused(checkpoint):
    folder, _ = checkpoint("glm_moe_dsa_shared")
    with pytest.raises(ValueError, match=r"layer 3 attends to .* --pipeline-layers"):
        load_stages(folder, (3, 2))
