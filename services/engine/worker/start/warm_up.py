"""Dummy steps that measure memory and build kernels before serving.

Their rows have no blocks: all keys and values go to the null block.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from models.batch_invariance import is_batch_invariant
from models.config import ModelConfig
from models.kernels.attention.configurations import (
    MANY_LATENT_TOKENS,
    first_requests_of_each_form,
)
from models.kernels.attention.latent.latent_forms import steps_of_each_form
from models.kernels.experts.expert_forms import (
    OF_8_BITS,
    ON_CORES,
    first_tokens_of_each_form,
)
from models.kernels.gpu import has_kernels
from models.kernels.products.linear_configurations import MOST_TOKENS
from models.kernels.products.packed.packed_configurations import BUILT_TOKENS as PACKED_TOKENS
from models.kernels.products.wide_configurations import tokens_of_other_gates
from models.kernels.recurrence.convolution_forms import first_queries_of_each_form
from models.layers.decoder import CausalLM
from models.layers.gated_mlp import GatedMLP
from models.loading.stored_formats import STACKED_MXFP4
from models.quantization.config import WeightKind
from services.engine.batch import (
    BatchBuilder,
    BatchDescriptor,
    FallbackReason,
    SpecDecodeMetadata,
    pack_int32,
    row_assignment,
)
from services.engine.limits import LEAST_SHARING_REQUESTS, StepLimits
from services.engine.request import SamplingParams
from services.engine.worker.runner.model_runner import ModelRunner
from services.engine.worker.runner.pending_result import PendingCopies, PendingResult

FIRST_STEPS = ((1,), (128,))
"""Prompt lengths of the steps whose kernels the first request needs."""

_DECODES: tuple[tuple[int, ...], ...] = ((1, 1), *((1,) * count for count in (8, 16, 32, 64, 128)))
"""Decodes with other kernels; see the tables in models.kernels."""

_SHORT_PROMPTS = (2, 2)
_PROMPT_TOKENS = (33, 256, 512, 520)
"""Tokens of other steps with other kernels, of as few prompts as they fit into."""

_EXPERT_KINDS: frozenset[WeightKind] = frozenset(("int4", "mxfp4", "nvfp4"))
"""Weights of 4 bits, whose experts have kernels of their own: ON_CORES."""
_PACKED_KINDS = _EXPERT_KINDS | {"int8"}
"""Weights whose products of many tokens have other kernels: PACKED_TOKENS."""

_INVARIANT_PROMPTS = (512, 768, 896, 1024, 1280, 1792, 2688, 4224)
"""In batch-invariant mode, tokens of more steps with other kernels.

With the largest step they run every choice of wide_configurations.invariant_wide_tiles for more
than 256 tokens, for any weight; also for packed weights, which have other kernels up to 640.
"""

_EVERYTHING = SamplingParams(
    temperature=1.0, top_p=0.9, repetition_penalty=1.1, logprobs=1, seed=0, max_tokens=1
)
_GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=1)


def early_steps(config: ModelConfig, limits: StepLimits) -> list[tuple[int, ...]]:
    """Returns the steps besides FIRST_STEPS whose kernels several first requests need.

    They are decodes of one token for each variant of the kernels, and a step of short prompts. The
    kernels of attention depend on the numbers of requests and heads, those of experts on the
    numbers of tokens and experts.
    """
    steps = [*_DECODES, _SHORT_PROMPTS]
    decodes = [(1,), *_DECODES]
    heads = {config.heads_of(layer).num_kv_heads for layer in range(config.num_hidden_layers)}
    firsts = [first_requests_of_each_form(each) for each in sorted(heads)]
    if limits.shared_prefix_tokens:
        # From here on steps may share prefixes, with other kernels of single tokens.
        steps.append((_SHORT_PROMPTS[0],) * LEAST_SHARING_REQUESTS)
        firsts = [sorted({*each, LEAST_SHARING_REQUESTS}) for each in firsts]
    if config.moe is not None:
        firsts.append(_first_tokens(config))
    for each in firsts:
        counts = [len(q_lens) for q_lens in decodes if _fits(q_lens, limits)]
        missing = [count for count in _untaken(each, counts) if count <= limits.max_num_seqs]
        decodes += [(1,) * count for count in missing]
        steps += [(1,) * count for count in missing]
    return steps


def later_steps(
    config: ModelConfig, limits: StepLimits, gates: Iterable[torch.Tensor]
) -> list[tuple[int, ...]]:
    """Returns the steps for each kernel variant without one in FIRST_STEPS and `early_steps`.

    gates: `gates_of` the model.
    """
    early = early_steps(config, limits)
    counts = [*_PROMPT_TOKENS, *(_INVARIANT_PROMPTS if is_batch_invariant() else ())]
    if _has_packed_products(config):
        counts += PACKED_TOKENS
    most = limits.max_num_batched_tokens
    steps: list[tuple[int, ...]] = []
    for each in (_prompts(min(count, most), limits.max_model_len) for count in counts):
        if each not in (*FIRST_STEPS, *steps):
            steps.append(each)
    if config.moe is not None:
        fitting = [each for each in (*FIRST_STEPS, *early, *steps) if _fits(each, limits)]
        experts = _first_tokens(config)
        num_dp = limits.data_parallel_size  # experts get the rows of all ranks
        missing = _untaken(experts, [num_dp * sum(q_lens) for q_lens in fitting])
        steps += [_prompts(-(-count // num_dp), limits.max_model_len) for count in missing]
    if config.mla is not None:
        steps += steps_of_each_form(config.mla, MANY_LATENT_TOKENS)
    fitting = [each for each in (*FIRST_STEPS, *early, *steps) if _fits(each, limits)]
    if limits.state_pages:
        lengths = [max(q_lens) for q_lens in fitting]
        steps += [(length,) for length in _untaken(first_queries_of_each_form(), lengths)]
    gated = _gated_tokens(gates, {sum(q_lens) for q_lens in fitting}, limits)
    return steps + [_prompts(count, limits.max_model_len) for count in gated]


def all_steps(
    config: ModelConfig, limits: StepLimits, gates: Iterable[torch.Tensor]
) -> list[tuple[int, ...]]:
    """Returns the prompt lengths of steps that run every kernel variant, first ones first.

    gates: `gates_of` the model.
    """
    return [*FIRST_STEPS, *early_steps(config, limits), *later_steps(config, limits, gates)]


def gates_of(model: CausalLM) -> list[torch.Tensor]:
    """Returns the weights [2 * N, K] of a model's gated products, one of each size and dtype."""
    weights = [
        layer.gate_up_proj.weight
        for layer in model.modules()
        if isinstance(layer, GatedMLP) and layer.fuses_gate
    ]
    return list({(each.shape, each.dtype): each for each in weights}.values())


def _gated_tokens(gates: Iterable[torch.Tensor], counts: set[int], limits: StepLimits) -> list[int]:
    """Returns tokens of steps that run the kernels of gated products that none of `counts` does."""
    others: list[int] = []
    for gate in () if is_batch_invariant() else gates:
        if has_kernels(gate.device) and limits.max_num_batched_tokens > MOST_TOKENS:
            others += tokens_of_other_gates(
                len(gate) // 2, gate.shape[1],
                [count for count in (*counts, *others) if count > MOST_TOKENS],
                limits.max_num_batched_tokens, dtype=gate.dtype, device=gate.device,
            )  # fmt: skip
    return others


def _first_tokens(config: ModelConfig) -> list[int]:
    """Returns the smallest number of tokens that takes each form of the experts."""
    moe = config.moe
    assert moe is not None, "the caller checked"
    others = []
    if config.quantization is not None:
        kinds = config.quantization.kinds
        if not kinds.isdisjoint(_EXPERT_KINDS):
            others.append(ON_CORES)
        if "fp8" in kinds:
            others.append(OF_8_BITS)
    return first_tokens_of_each_form(moe.num_experts, moe.num_experts_per_tok, *others)


def _has_packed_products(config: ModelConfig) -> bool:
    quantization = config.quantization
    if quantization is None or quantization.method == STACKED_MXFP4:  # experts alone
        return False
    return not quantization.kinds.isdisjoint(_PACKED_KINDS)


def _untaken(firsts: Sequence[int], counts: Iterable[int]) -> list[int]:
    """Returns the first number of each variant that none of the counts uses."""
    taken = {bisect_right(firsts, count) - 1 for count in counts}
    return [first for way, first in enumerate(firsts) if way not in taken]


def largest_step(limits: StepLimits) -> BatchDescriptor:
    """Builds a step with the most tokens and sampling rows.

    Each row has penalties, top-p and log-probabilities, so that all of their memory is measured.
    The last request continues a sequence as long as one can be: block tables, and the scores of
    attention that chooses its keys, take memory by the longest sequence of a step.
    """
    longest = 1 if limits.computes_whole_prompts else limits.max_model_len - limits.decode_q_len
    return _step(_most_queries(limits), _EVERYTHING, limits, has_grammars=True, longest=longest)


def _most_queries(limits: StepLimits) -> list[int]:
    """Returns the lengths of as many prompts as there are rows, with the most tokens in all."""
    remaining = limits.max_num_batched_tokens
    num_requests = min(limits.max_num_seqs, remaining)
    q_lens = []
    for row in range(num_requests):
        q_lens.append(min(limits.max_model_len, remaining - (num_requests - 1 - row)))
        remaining -= q_lens[-1]
    return q_lens


def small_step_of_everything(limits: StepLimits) -> BatchDescriptor:
    """Builds the largest step of a few tokens, with all features of sampling."""
    few = min(8, limits.max_num_seqs)
    return _step([1] * few, _EVERYTHING, limits, has_grammars=True)


def run_small_steps(
    runner: ModelRunner,
    limits: StepLimits,
    kinds: Iterable[Sequence[int]],
    *,
    between: Callable[[], None] = lambda: None,
) -> None:
    """Queues small steps with these prompt lengths; skips steps over the limits.

    between: is called after each.
    """
    for _ in queue_small_steps(runner, limits, kinds):
        between()


def queue_small_steps(
    runner: ModelRunner, limits: StepLimits, kinds: Iterable[Sequence[int]]
) -> Iterator[PendingResult | PendingCopies]:
    """Queues the same steps one at a time, as the caller asks for their results."""
    if runner.device.type == "cuda":
        torch.cuda.set_device(runner.device)  # this may be a new thread
    for q_lens in kinds:
        if _fits(q_lens, limits):
            yield runner.execute(_step(q_lens, _GREEDY, limits))
            adapters = runner.buffers.adapters
            if adapters is not None:
                with adapters.building_kernels():
                    pending = runner.execute(_step(q_lens, _GREEDY, limits))
                yield pending
            prefixes = runner.buffers.prefixes if _may_share(q_lens, limits) else None
            if prefixes is not None:
                with prefixes.building_kernels():
                    pending = runner.execute(_step(q_lens, _GREEDY, limits))
                yield pending
            images = runner.forward.images if limits.max_whole_tokens else None
            if q_lens == _SHORT_PROMPTS and images is not None:
                with images.building_kernels():
                    pending = runner.execute(_step(q_lens, _GREEDY, limits))
                yield pending


def _may_share(q_lens: Sequence[int], limits: StepLimits) -> bool:
    """Whether a step also runs with a plan of shared prefixes, which takes other kernels."""
    is_short = max(q_lens) <= _SHORT_PROMPTS[0] and len(q_lens) >= LEAST_SHARING_REQUESTS
    return is_short and bool(limits.shared_prefix_tokens)


def prompts_of(num_tokens: int, limits: StepLimits) -> tuple[int, ...]:
    """Returns the lengths of prompts of one block each with `num_tokens` tokens in all."""
    q_len = min(limits.block_size, limits.max_model_len, num_tokens)
    return (q_len,) * min(num_tokens // q_len, limits.max_num_seqs)


def _prompts(num_tokens: int, max_model_len: int) -> tuple[int, ...]:
    """Returns the lengths of the fewest prompts with `num_tokens` tokens in all."""
    num_whole, rest = divmod(num_tokens, max_model_len)
    return (max_model_len,) * num_whole + ((rest,) if rest else ())


def _fits(q_lens: Sequence[int], limits: StepLimits) -> bool:
    return (
        len(q_lens) <= limits.max_num_seqs
        and sum(q_lens) <= limits.max_num_batched_tokens
        and max(q_lens) <= limits.max_model_len
    )


def _step(
    q_lens: Sequence[int],
    sampling: SamplingParams,
    limits: StepLimits,
    *,
    has_grammars: bool = False,
    longest: int = 1,
) -> BatchDescriptor:
    """Builds a step of new requests with these prompt lengths, all sampling.

    It rewrites null block entries unchanged, to run that kernel too. With grammars, one that allows
    all tokens decides every token. The last request has at least `longest` tokens.
    """
    builder = BatchBuilder()
    builder.update_blocks(0, 0, [0])
    for row, q_len in enumerate(q_lens):
        builder.row_ids.append(row)
        builder.q_lens.append(q_len)
        builder.seq_lens.append(max(q_len, longest) if row == len(q_lens) - 1 else q_len)
        builder.sample_indices.append(row)
        builder.row_assignments.append(
            row_assignment(row=row, token_ids=[0], num_prompt_tokens=1, sampling=sampling)
        )
        if has_grammars:
            builder.grammar_rows.append(row)
            builder.grammar_masks.append(b"\xff" * (4 * -(-limits.vocab_size // 32)))
    if limits.num_speculative_tokens:
        builder.drafts = SpecDecodeMetadata(
            num_spec_steps=limits.num_speculative_tokens,
            num_next_drafts=limits.num_speculative_tokens,
            num_draft_tokens=pack_int32([0] * len(q_lens)),
        )
    if limits.num_stages > 1:
        builder.last_token_ids = [0] * len(q_lens)
    builder.all_greedy = sampling.is_greedy
    builder.needs_logit_edits = builder.needs_logprobs = sampling.logprobs is not None
    return builder.build(
        step_id=0,
        is_prefill=True,
        graph_key=None,
        fallback_reason=FallbackReason.FALLBACK_REASON_UNSUPPORTED,
    )
