import numpy as np
import pytest
import torch

from services.engine.batch import SamplingMetadata, pack_int32
from services.engine.sampling.grammar_masks import apply_grammars
from tests.support.token_masks import mask_of

VOCAB = 40


def metadata(rows, masks, num_sampling=3):
    return SamplingMetadata(
        sample_indices=pack_int32(range(num_sampling)),
        grammar_rows=pack_int32(rows),
        grammar_masks=b"".join(masks),
    )


def test_rows_without_a_grammar_keep_every_logit():
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    masked = apply_grammars(logits, metadata([1], [mask_of([5, 39], VOCAB)]), VOCAB)
    assert torch.equal(masked[[0, 2]], logits[[0, 2]])
    assert torch.isfinite(masked[1]).nonzero().flatten().tolist() == [5, 39]
    assert torch.isfinite(logits).all()


def test_float32_logits_may_be_overwritten_and_half_precision_becomes_float32():
    logits = torch.zeros(3, VOCAB)
    masks = metadata([0], [mask_of([1], VOCAB)])
    assert apply_grammars(logits, masks, VOCAB, in_place=True) is logits
    assert apply_grammars(logits.half(), masks, VOCAB, in_place=True).dtype == torch.float32


@pytest.mark.parametrize(
    ("rows", "masks"),
    [
        ([0, 0], [mask_of([1], VOCAB)] * 2),
        ([3], [mask_of([1], VOCAB)]),
        ([-1], [mask_of([1], VOCAB)]),
        ([0], [mask_of([1], VOCAB)[:-1]]),
        ([0, 1], [mask_of([1], VOCAB)]),
        ([0], [np.zeros(64, np.uint8).tobytes()]),
    ],
)
def test_masks_that_do_not_fit_the_step_are_refused(rows, masks):
    with pytest.raises(ValueError, match="descriptor is invalid"):
        apply_grammars(torch.zeros(3, VOCAB), metadata(rows, masks), VOCAB)


def test_among_rows_with_drafts_a_grammar_decides_the_first_token_of_its_row():
    logits = torch.zeros(6, VOCAB)  # two rows of one token and two drafts each
    masks = metadata([1], [mask_of([5], VOCAB)], num_sampling=2)
    masked = apply_grammars(logits, masks, VOCAB)
    assert torch.isfinite(masked[3]).nonzero().flatten().tolist() == [5]
    assert torch.isfinite(masked[[0, 1, 2, 4, 5]]).all()
