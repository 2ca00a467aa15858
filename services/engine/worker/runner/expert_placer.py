"""Whole experts of a model: their load, and moves of them between ranks."""

import torch

from models.layers.decoder import CausalLM
from models.layers.experts import Experts
from models.parallel.expert_placement import ExpertPlacement
from protos.engine.v1 import worker_pb2
from services.engine.worker.runner.adapter_store import AdapterStore


class ExpertPlacer:
    """The layers of a model whose ranks hold whole experts; none if they do not."""

    def __init__(self, model: CausalLM, adapters: AdapterStore | None) -> None:
        """Finds the layers; adapters: those of the model, if it has room for some."""
        self._adapters = adapters
        self._layers = [
            each
            for each in model.modules()
            if isinstance(each, Experts) and each.placement is not None
        ]

    @property
    def layout(self) -> worker_pb2.ExpertLayout | None:
        """Says who holds what before any move; None without whole experts."""
        if not self._layers:
            return None
        placement = self._layers[0].placement
        assert placement is not None, "it was chosen by that"
        return worker_pb2.ExpertLayout(
            num_layers=len(self._layers),
            num_experts=placement.num_experts,
            num_ranks=placement.num_ranks,
            physical_to_logical=placement.physical_to_logical,
        )

    @torch.inference_mode()
    def place(self, order: worker_pb2.ExpertPlacement) -> None:
        """Moves a layer's experts; all ranks do so between the same two steps."""
        experts = self._layers[order.layer]
        assert experts.placement is not None, "it was chosen by that"
        changed = experts.place(
            ExpertPlacement(
                num_experts=experts.placement.num_experts,
                num_ranks=experts.placement.num_ranks,
                physical_to_logical=tuple(order.physical_to_logical),
            )
        )
        if self._adapters is not None:
            self._adapters.follow(experts, changed)

    def load(self) -> worker_pb2.ExpertLoad:
        """Returns how often tokens have chosen each expert; waits for the device."""
        loads = [each.expert_load for each in self._layers]
        counts = torch.stack(loads).flatten().tolist() if loads else ()
        return worker_pb2.ExpertLoad(counts=counts)

    @torch.inference_mode()
    def forget_load(self) -> None:
        """Sets all counts to zero."""
        for each in self._layers:
            each.expert_load.zero_()
