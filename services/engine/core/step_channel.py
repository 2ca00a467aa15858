"""The worker as a step loop sees it."""

from collections.abc import Sequence
from typing import Protocol

from protos.engine.v1 import worker_pb2 as pb
from services.engine.batch import BatchDescriptor, StepResult
from services.engine.core.step_pause import OrderChannel


class StepChannel(OrderChannel, Protocol):
    """The part of an executor that runs steps."""

    def send(self, descriptor: BatchDescriptor, *others: BatchDescriptor) -> None:
        """Orders a step, of the first data-parallel rank and the others; never blocks."""

    def place_experts(self, layer: int, placement: Sequence[int]) -> None:
        """Orders a move of a layer's experts between the steps before and after the call."""

    def read_expert_load(self) -> None:
        """Asks for the load of experts, which `receive` returns."""

    async def receive(
        self,
    ) -> (
        StepResult
        | pb.GraphReport
        | pb.Recompilation
        | pb.CompileReport
        | pb.ExpertLoad
        | pb.DiskReport
    ):
        """Returns the next result, in the order of the steps sent, or another report."""
