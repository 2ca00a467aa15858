"""Copies between the tiers of the KV cache, in steps and in their results."""

from services.engine.batch import BatchDescriptor, StepResult, pack_block_copies
from services.engine.kv_cache.tiered_cache import TieredKVCache
from services.engine.scheduler.planned_step import ScheduledStep


def order_copies(tiers: TieredKVCache, descriptor: BatchDescriptor) -> None:
    """Adds to a step that is sent now what it stores and loads."""
    copies = tiers.take_tier_copies(descriptor.step_id)
    if copies is not None:
        descriptor.block_copies.CopyFrom(pack_block_copies(copies.stored, copies.loaded))


def observe_copies(tiers: TieredKVCache, step: ScheduledStep, result: StepResult) -> None:
    """Takes what a step that has run shows of copies, and of the time that prompts take."""
    host, context = tiers.host, step.descriptor.context
    host.settle(step.step_id)
    host.counts.copy_s += result.block_copy_us / 1e6
    if context.is_prefill:
        host.rule.observe_prompts(context.num_tokens, result.elapsed_us)
