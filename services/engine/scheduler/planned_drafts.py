"""The plan of drafts of a scheduler with some limits."""

from services.engine.limits import StepLimits
from services.engine.spec_decode.carried_drafts import CarriedDrafts
from services.engine.spec_decode.draft_length import choice_of
from services.engine.spec_decode.draft_plan import DraftPlan


def plan_drafts(limits: StepLimits, num_cache_tokens: int) -> DraftPlan | None:
    """Returns the speculation of a scheduler with these limits; None without any.

    num_cache_tokens: most tokens of a request that holds all blocks.
    """
    if not limits.num_speculative_tokens:
        return None
    rows = None
    if not limits.lookup_sizes:
        rows = CarriedDrafts(
            max_num_seqs=limits.max_num_seqs, num_drafts=limits.num_speculative_tokens
        )
    return DraftPlan(
        num_tokens=limits.num_speculative_tokens,
        # The token after all drafts, if they are accepted, is within max_model_len too.
        max_seq_len=min(limits.max_model_len - 1, num_cache_tokens),
        num_written_ahead=limits.num_written_ahead,
        lookup_sizes=limits.lookup_sizes,
        # Data-parallel ranks have equally many drafts, which the caller chooses.
        length=None if limits.data_parallel_size > 1 else choice_of(limits.draft_lengths),
        rows=rows,
    )
