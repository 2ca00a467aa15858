"""A request in planning code, without tensors or protobuf."""

import enum
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from services.engine.adapter import Adapter
from services.engine.constraint import Constraint
from services.engine.errors import EngineError, InvalidRequestError
from services.engine.prompt_image import PromptImage
from services.engine.request_times import RequestTimes
from services.engine.structured_output import StructuredOutput

BlockIds: TypeAlias = "array[int]"
"""The many blocks of a state, packed: a list of numbers is several times slower to copy."""

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MIN_REPETITION_PENALTY = 0.0625
"""Logits are divided by it; a divisor of 1e-37 makes them infinite."""
MAX_STOP_TOKEN_IDS = 64
MAX_ALLOWED_TOKEN_IDS = 65_536
MAX_FORBIDDEN_TOKENS = 2048
"""Tokens of all forbidden sequences of a request."""
MAX_EOS_TOKEN_IDS = 64
MAX_PRIORITY = 100
UNBOUNDED = 2**62
"""More tokens than any output has."""


class FinishReason(enum.Enum):
    """Why a request ended without an error."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """A request's sampling, with all defaults filled in.

    protos/common/v1/sampling.proto defines the fields. `end_token_ids` are the ids that end the
    request: its own stop tokens, and the model's unless ignored.

    Raises:
        InvalidRequestError: a value is outside its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int
    logit_bias: tuple[tuple[int, float], ...] = ()
    banned_token_ids: frozenset[int] = frozenset()
    """Forbidden sequences of one token."""
    forbidden_sequences: tuple[tuple[int, ...], ...] = ()
    """Those of several tokens, without the ones that have a banned token."""
    allowed_tokens: bytes | None = None
    """A bit for each token that may be chosen, as in a `Constraint`'s mask; None allows all."""
    end_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    max_tokens: int
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    num_speculative_tokens: int | None = None

    def __post_init__(self) -> None:
        _check_range("temperature", self.temperature, 0, 100)
        _check_range("top_p", self.top_p, 0, 1, open_low=True)
        _check_range("min_p", self.min_p, 0, 1)
        _check_range("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, 10)
        _check_range("frequency_penalty", self.frequency_penalty, -2, 2)
        _check_range("presence_penalty", self.presence_penalty, -2, 2)
        _check_range("max_tokens", self.max_tokens, 1, math.inf)
        _check_range("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.logprobs is not None:
            _check_range("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _check_range("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        num_biases = len(self.logit_bias) + len(self.banned_token_ids)
        if num_biases > MAX_LOGIT_BIAS:
            raise InvalidRequestError(
                f"logit_bias has {num_biases} entries, forbidden sequences of one token included;"
                f" the limit is {MAX_LOGIT_BIAS}",
                field="logit_bias",
            )
        for token_id, bias in self.logit_bias:
            _check_range(f"logit_bias[{token_id}]", bias, -100, 100)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """Additions to logits, by token id; minus infinity for banned tokens."""
        banned = dict.fromkeys(self.banned_token_ids, -math.inf)
        return tuple(sorted((dict(self.logit_bias) | banned).items()))

    @property
    def has_logit_edits(self) -> bool:
        """Whether penalties, bias or min_tokens change the logits."""
        return bool(
            self.repetition_penalty != 1
            or self.frequency_penalty
            or self.presence_penalty
            or self.logit_bias
            or self.banned_token_ids
            or (self.min_tokens and self.end_token_ids)
        )


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """Log-probabilities of one position, before penalties, temperature and truncation."""

    logprob: float
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class DraftIndex(Protocol):
    """Finds drafts in a request's own tokens."""

    def following(self, token_ids: list[int], count: int) -> list[int]:
        """Returns up to `count` tokens that may follow; tokens have only been added since."""


class OutputSink(Protocol):
    """Takes the output of requests of one session or call."""

    def put(self, output: "RequestOutput") -> None:
        """Takes one request's output of one step; must not block."""

    def put_tokens(self, requests: Sequence["Request"], handles: bytes, token_ids: bytes) -> None:
        """Takes one token of each of several requests; by default output by output.

        handles, token_ids: of each request, packed as uint32 and int32.
        """
        for request, token_id in zip(requests, memoryview(token_ids).cast("i"), strict=True):
            self.put(RequestOutput(request, [token_id]))

    def flush(self) -> None:
        """Called once after the last `put` of a step."""


@dataclass(frozen=True, slots=True, eq=False)
class StepMark:
    """A step and a moment of it, in seconds of `time.monotonic()`, shared by its requests."""

    step_id: int
    at_s: float


@dataclass(eq=False, slots=True, kw_only=True)
class Snapshot:
    """The blocks of a copied state after `num_tokens` tokens; no key: it cannot be found yet.

    num_holders: the request that makes it, until its tokens are known, and steps that copy it.
    """

    num_tokens: int
    block_ids: BlockIds
    key: bytes | None = None
    num_holders: int = 1


class RequestStatus(enum.Enum):
    """Whether a request waits, holds a row and blocks, or has ended."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One request, from submission to its end.

    The caller sets the fields up to `constraint`; only the scheduler, its KV cache and its draft
    plan write the others. Times are seconds of `time.monotonic()`.
    """

    request_id: str
    handle: int
    prompt_token_ids: list[int]
    sampling: SamplingParams
    sink: OutputSink
    priority: int = 0
    cache_salt: str = ""
    adapter: Adapter | None = None
    """Computes the request; None: the model itself."""
    weights_salt: bytes = b""
    """Keeps what other weights have cached apart; the core sets it, like the versions."""
    weights_version: str = ""
    """Version of the weights that compute the request now."""
    first_weights_version: str | None = None
    """Version of the weights that made its first token, or its cache, if it is another one."""
    caller: str = ""
    """Opaque name of the caller, whose grammars take turns with those of others."""
    resumed_token_ids: list[int] = field(default_factory=list)
    """Output of a lost engine, after which the request goes on."""
    images: tuple[PromptImage, ...] = ()
    """Images in the prompt, in the order of their tokens."""
    arrival_s: float
    deadline_s: float | None = None
    traceparent: str = ""
    """Parent of the request's spans; empty without a trace."""
    structured_output: StructuredOutput | None = None
    constraint: Constraint | None = None
    """Enforces `structured_output`, and then the token rules of `sampling`; set before the request
    is queued."""

    status: RequestStatus = RequestStatus.WAITING
    token_ids: list[int] = field(init=False)
    """The known tokens of prompt and output."""
    num_prompt_tokens: int = field(init=False)
    num_computed_tokens: int = 0
    """Tokens with keys and values in the cache, or ordered in a step already sent."""
    num_pending_tokens: int = 0
    """Tokens that steps already sent will sample."""
    num_plain_tokens: int = 0
    """While fewer are computed, the next step computes one more and needs nothing for it; set once
    the request decodes, 0 where that is to be found out."""
    draft_token_ids: list[int] = field(default_factory=list)
    """Drafts after the known tokens, if none is pending; the next step verifies them."""
    num_pending_drafts: int = 0
    """Drafts that steps already sent verify: as many more tokens may be pending."""
    num_held_drafts: int = 0
    """Drafts of the last step with a result that were accepted."""
    num_carried_drafts: int = 0
    """Drafts that the worker makes after the pending tokens; the next step verifies them."""
    ngrams: DraftIndex | None = None
    """Where drafts are looked up; made with the first of them."""
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache held when the request first ran."""
    num_loaded_blocks: int = 0
    """Blocks that were loaded into the cache for the request since it last began to wait."""
    block_ids: list[int] = field(default_factory=list)
    """Blocks that the request holds, in order of position, one of each layer group."""
    block_keys: list[bytes] = field(default_factory=list)
    """Prefix keys of the full blocks hashed so far; a preemption keeps them."""
    state_block_ids: BlockIds = field(default_factory=lambda: array("i"))
    """Blocks of the request's states, of a model whose layers keep some."""
    snapshots: list[Snapshot] = field(default_factory=list)
    """Snapshots of the state whose tokens are not all known yet."""
    last_snapshot: int = 0
    """Tokens before the newest snapshot of the request, or the one that it started from."""
    junction: int = 0
    """Tokens after which a snapshot would have served the request; 0 for none."""
    num_indexed_blocks: int = 0
    """Blocks held, from the first on, that other requests can find."""
    num_prompt_logprobs: int = 0
    """Prompt tokens with known log-probabilities; the first one has none."""
    max_num_tokens: int = 0
    """Most tokens of prompt and output together; set, like the next two, at submission."""
    rank_s: float = 0.0
    """The arrival, moved by the priority."""
    arrival_index: int = 0
    """Position in the order of submission."""
    row: int | None = None
    data_parallel_rank: int = 0
    """The rank that runs it, of several that have requests of their own."""
    started: StepMark | None = None
    """The step that first computed tokens of the request, marked when it was scheduled."""
    num_losses: int = 0
    """Workers lost while they ran a step of the request."""
    trial_end: int = 0
    """Number of known tokens that clears a suspect; it runs alone until then."""
    num_preemptions: int = 0
    times: RequestTimes = field(init=False)
    first_token: StepMark | None = None
    last_token: StepMark | None = None

    def __post_init__(self) -> None:
        self.token_ids = [*self.prompt_token_ids, *self.resumed_token_ids]
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.times = RequestTimes(self.arrival_s)

    @property
    def adapter_digest(self) -> bytes:
        """Digest of the adapter, which cached tokens depend on; empty without one."""
        return b"" if self.adapter is None else self.adapter.digest

    @property
    def cache_root(self) -> tuple[str, bytes, bytes]:
        """All that cached tokens depend on, besides themselves: arguments of `root_key`."""
        return self.cache_salt, self.adapter_digest, self.weights_salt

    @property
    def num_output_tokens(self) -> int:
        """Known output tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_drafts(self) -> int:
        """Drafts that the next step verifies."""
        return self.num_carried_drafts if self.num_pending_tokens else len(self.draft_token_ids)

    @property
    def needs_prompt_logits(self) -> bool:
        """Whether the whole prompt must be computed for its log-probabilities."""
        return (
            self.sampling.prompt_logprobs is not None
            and self.num_prompt_logprobs < self.num_prompt_tokens - 1
        )

    @property
    def awaits_mask(self) -> bool:
        """Whether the next token needs a mask that is not computed yet."""
        return self.needs_mask and bool(
            self.num_pending_tokens or self.constraint is None or self.constraint.mask is None
        )

    @property
    def needs_mask(self) -> bool:
        """Whether the next token needs a mask."""
        constraint = self.constraint
        return constraint is not None and self.num_pending_tokens >= constraint.num_free_tokens

    @property
    def is_suspect(self) -> bool:
        """Whether the request was in a lost worker's last steps and is not cleared yet."""
        return len(self.token_ids) < self.trial_end

    def release(self) -> None:
        """Closes the constraint; may be called again."""
        if self.constraint is not None:
            self.constraint.close()

    def restart(self) -> None:
        """Resets the state of a lost worker; the known tokens remain."""
        self.status = RequestStatus.WAITING
        self.times.num_recomputed_tokens += self.num_computed_tokens
        self.num_computed_tokens = self.num_pending_tokens = self.num_pending_drafts = 0
        self.num_held_drafts = self.num_plain_tokens = 0
        self.draft_token_ids, self.state_block_ids, self.snapshots = [], array("i"), []
        self.block_ids.clear()
        self.num_indexed_blocks = 0
        self.row = None


@dataclass(slots=True)
class RequestOutput:
    """One request's output of one step."""

    request: Request
    token_ids: list[int]
    previous: StepMark | None = None
    """The step of the request's last token before these."""
    logprobs: Sequence[PositionLogprobs] = ()
    """One entry per token id if the request asked for log-probabilities, else empty."""
    prompt_logprobs: Sequence[PositionLogprobs] = ()
    """Of the prompt tokens after the ones already sent; the first token has none."""
    finish_reason: FinishReason | None = None
    error: EngineError | None = None
    """Why the request failed; then finish_reason is None and this output is the last."""
    stop_token_id: int | None = None
    vector: bytes = b""
    """The prompt's vector, little-endian float32; empty where tokens are generated."""

    @property
    def is_last(self) -> bool:
        """Whether this output ends the request."""
        return self.finish_reason is not None or self.error is not None


def _check_range(
    name: str, value: float, low: float, high: float, *, open_low: bool = False
) -> None:
    """Raises InvalidRequestError unless low <= value <= high (low < value when open_low)."""
    above = low < value if open_low else low <= value
    if not (above and value <= high):  # NaN fails both comparisons
        bracket = "(" if open_low else "["
        raise InvalidRequestError(
            f"{name} is {value}; it must be in {bracket}{low}, {high}]",
            field=name.partition("[")[0],
        )
