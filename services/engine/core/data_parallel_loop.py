"""The loop of the steps of data-parallel ranks, which run at the same time."""

from services.engine.batch import StepResult, num_rows
from services.engine.core.step_loop import StepLoop
from services.engine.request import Request
from services.engine.scheduler.scheduler import ScheduledStep


class DataParallelLoop(StepLoop):
    """Runs the steps of all ranks on their workers until one is lost."""

    @property
    def requests_in_flight(self) -> set[Request]:
        """The requests of the steps in flight, of all ranks."""
        return {
            request
            for step in self._in_flight
            for part in (step, *step.others)
            for request in (*part.requests, *part.unsampled)
        }

    def _send(self, step: ScheduledStep) -> None:
        self._channel.send(step.descriptor, *(each.descriptor for each in step.others))

    def _count(self, step: ScheduledStep, result: StepResult) -> None:
        """Counts one step for all ranks, of the size that each of them computed."""
        parts, counters = (step, *step.others), self._counters
        largest = max(parts, key=lambda part: part.descriptor.context.num_tokens)
        counters.graph_dispatch[self._graphs.count(largest.descriptor, result)] += 1
        counters.drafts.count_step(step.descriptor)
        for part, own in zip(parts, (result, *result.across_dp), strict=True):
            counters.drafts.count(part.descriptor, own)
        contexts = [part.descriptor.context for part in parts]
        counters.num_step_tokens += sum(each.num_tokens for each in contexts)
        self._history.count(
            num_tokens=num_rows(step.descriptor),
            batch_size=max(each.batch_size for each in contexts),
        )
        if self._watchers.are_any:
            for part, own in zip(parts, _separate(result), strict=True):
                self._watchers.publish(part, own)


def _separate(result: StepResult) -> list[StepResult]:
    """Takes joined results apart."""
    others = []
    for each in result.across_dp:
        others.append(StepResult())
        others[-1].CopyFrom(each)
    result.ClearField("across_dp")
    return [result, *others]
