"""Limits of the worker, and of a request that can ever fit."""

from dataclasses import dataclass

from services.engine.errors import InvalidRequestError
from services.engine.kv_cache.cache_groups import CacheGroups
from services.engine.spec_decode.draft_plan import DraftPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Limits of the worker's tables and memory."""

    max_num_seqs: int
    """Rows of the worker's tables, hence most requests in one step."""
    max_num_batched_tokens: int
    """Most query tokens in one step."""
    max_model_len: int
    """Most tokens of prompt and output together."""
    max_num_waiting: int
    """Most requests that wait; more are refused."""
    block_size: int
    """Tokens in one block."""
    num_blocks: int
    """Blocks of the KV cache, the null block included."""
    enable_prefix_caching: bool
    """Whether requests share the blocks of common prefixes."""
    windows: tuple[int | None, ...] = (None,)
    """For each group of layers the tokens that it keeps blocks of; None means all."""
    num_speculative_tokens: int = 0
    """Draft tokens of each request in a step; 0 without speculative decoding."""

    @property
    def max_running(self) -> int:
        """Most requests that run at once: each of them gets a row, and a token in every step."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def cache_groups(self) -> CacheGroups:
        """Groups of layers with the blocks that each needs."""
        return CacheGroups(
            block_size=self.block_size,
            # Blocks reach over the drafts that come next, too.
            max_query_tokens=self.max_num_batched_tokens + self.num_speculative_tokens,
            windows=self.windows,
        )

    @property
    def num_cache_tokens(self) -> int:
        """Tokens whose keys and values fit when one request may hold every block.

        The count stops at max_model_len.
        """
        return self.cache_groups.num_tokens(self.num_blocks - 1, limit=self.max_model_len)

    @property
    def draft_plan(self) -> DraftPlan | None:
        """Limits of drafts; None without speculation."""
        if not self.num_speculative_tokens:
            return None
        return DraftPlan(
            num_tokens=self.num_speculative_tokens,
            # The token after all drafts, if they are accepted, is within max_model_len too.
            max_seq_len=min(self.max_model_len - 1, self.num_cache_tokens),
        )

    def bound_tokens(self, num_prompt_tokens: int, max_tokens: int) -> int:
        """Returns how many tokens a request can reach, prompt and output together.

        That is the least of what it asks for, of max_model_len and of what the KV cache holds when
        the request has it to itself. The last token's keys and values are never needed, so it may
        be one more than the cache holds.

        Raises:
            InvalidRequestError: the prompt alone is too long for the model or for the KV cache.
        """
        if num_prompt_tokens >= self.max_model_len:
            raise InvalidRequestError(
                f"the prompt has {num_prompt_tokens} tokens; it must have fewer than "
                f"max_model_len, which is {self.max_model_len}"
            )
        if num_prompt_tokens > self.num_cache_tokens:
            raise InvalidRequestError(
                f"the prompt has {num_prompt_tokens} tokens; "
                f"the KV cache holds {self.num_cache_tokens}"
            )
        return min(num_prompt_tokens + max_tokens, self.max_model_len, self.num_cache_tokens + 1)
