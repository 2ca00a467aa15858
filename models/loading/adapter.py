"""Reads a low-rank adapter in PEFT's format for a loaded model."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_ISREG

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from torch import nn

from models.config_sections.fields import ConfigError, shown
from models.layers.adapter_room import LayerAdapter, adapted_layers, experts_by_layer
from models.layers.decoder import CausalLM
from models.layers.quantization import QuantizableLinear
from models.layers.weight import check_shape
from models.loading.adapter_config import CONFIG_FILE, WEIGHTS_FILE, AdapterConfig, digest_of
from models.loading.expert_adapter import ExpertFactors, ExpertModule, by_layer, expert_shares
from models.loading.header import find_damage
from models.loading.names import (
    Destination,
    find_destinations,
    is_of_another_stage,
    merged_parts,
    renamed,
)

PICKLE_FILE = "adapter_model.bin"
MAX_HEADER_BYTES = 2**24
"""Room for the names of an adapter's tensors."""
_STORED_BYTES = 4
"""Most bytes of a stored element."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NAME = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?:(?P<factor>[AB])(?:\.default)?\.weight"
    r"|embedding_(?P<table_factor>[AB])(?:\.default)?)"
)
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class AdapterError(ValueError):
    """An adapter is damaged, or does not fit the model; the message says what is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """An adapter in host memory: this rank's share of each of its layers.

    digest: SHA-256 of its files. rank: its largest.
    """

    digest: bytes
    rank: int
    layers: tuple[LayerAdapter, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(each.nbytes for each in self.layers)


@dataclass(slots=True)
class _Factors:
    """The stored factors of one module, by "A" and "B"; is_table: it looks tokens up."""

    stored: dict[str, torch.Tensor] = field(default_factory=dict)
    is_table: bool = False


class AdapterReader:
    """Reads adapters for one model. Any thread may call `read`."""

    def __init__(self, model: CausalLM, *, num_ranks: int = 1, is_pinned: bool = False) -> None:
        """Finds where each module of the checkpoint is.

        Args:
            model: with room for adapters.
            num_ranks: ranks that share its layers.
            is_pinned: whether host memory is pinned, so that copies to the device do not wait.
        """
        self._model = model
        self._is_pinned = is_pinned
        self._layers = set(adapted_layers(model))
        # Experts that move between ranks come to any of them, so host memory has all adapters.
        self._experts = {
            number: each.on_one_rank()
            if any(room.held is not None for room in each.rooms)
            else each
            for number, each in experts_by_layer(model).items()
        }
        self._destinations = {
            name: each
            for name, each in find_destinations(model).items()
            if name.endswith(".weight")
        }
        layers = (_layer_of(each) for each in self._destinations.values())
        self._num_stored = Counter(each for each in layers if each is not None)
        num_elements = sum(_num_elements(each, model.max_adapter_rank) for each in self._layers)
        vocabulary = model.config.vocab_size + model.config.hidden_size
        num_elements += 2 * model.max_adapter_rank * vocabulary
        for experts in self._experts.values():
            for room in experts.rooms:
                own = sum(each[0].numel() for each in room.tensors)
                num_elements += own * -(-experts.num_experts // room.num_experts)
        # Ranks hold shares, and stages some layers: the file has all of them.
        self._max_bytes = MAX_HEADER_BYTES + _STORED_BYTES * num_elements * num_ranks

    def read(self, folder: Path) -> Adapter:
        """Reads an adapter's folder.

        Raises:
            AdapterError: a file is missing or damaged, or the adapter does not fit the model.
        """
        try:
            config = AdapterConfig.read(folder)
        except ConfigError as error:
            raise AdapterError(str(error)) from None
        file = folder / WEIGHTS_FILE
        if config.max_rank > self._model.max_adapter_rank:
            raise AdapterError(
                f"{folder / CONFIG_FILE}: the rank is {config.max_rank}; --max-lora-rank is "
                f"{self._model.max_adapter_rank}"
            )
        content = self._read_file(file)
        digest = digest_of(folder, content)
        try:
            tensors = load_safetensors(content)
        except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise AdapterError(f"{file} is damaged: {find_damage(file) or error}") from None
        try:
            layers = tuple(self._shares(_by_module(tensors), config))
        except ValueError as error:
            raise AdapterError(f"{file}: {error}") from None
        return Adapter(digest=digest, rank=config.max_rank, layers=layers)

    def _read_file(self, file: Path) -> bytes:
        """Returns the weights. They are not mapped: the file may change while it is read."""
        try:
            status = file.stat()
        except FileNotFoundError:
            if (file.parent / PICKLE_FILE).exists():
                raise AdapterError(
                    f"{file} is missing; {PICKLE_FILE} is a pickle, which may run any code and is "
                    "never read: save the adapter as safetensors"
                ) from None
            raise AdapterError(f"{file} is missing") from None
        except OSError as error:
            raise AdapterError(f"{file} cannot be read: {error.strerror}") from None
        if not S_ISREG(status.st_mode):
            raise AdapterError(f"{file} is not a regular file")
        if status.st_size > self._max_bytes:
            raise AdapterError(
                f"{file} has {status.st_size} bytes; an adapter of this model has at most "
                f"{self._max_bytes}"
            )
        try:
            with file.open("rb") as stream:
                return stream.read(self._max_bytes)
        except OSError as error:
            raise AdapterError(f"{file} cannot be read: {error.strerror}") from None

    def _shares(
        self, modules: Mapping[str, _Factors], config: AdapterConfig
    ) -> Iterator[LayerAdapter]:
        """Yields this rank's share of each layer that the adapter changes."""
        stored_by_layer: dict[
            QuantizableLinear, list[tuple[Destination, torch.Tensor, torch.Tensor]]
        ] = defaultdict(list)
        experts = []
        for module, factors in modules.items():
            name = renamed(f"{module}.weight", self._model)
            expert = ExpertModule.parse(module, name.removesuffix(".weight"))
            if expert is not None:
                experts.append(self._of_experts(expert, factors, config, modules))
                continue
            a, b = self._checked(module, factors, config.rank_of(module))
            if name in (_EMBEDDING, _HEAD):
                yield from self._of_vocabulary(module, name, factors, config)
                continue
            if factors.is_table:
                raise ValueError(f"it adapts {module} as an embedding, and the model has another")
            scaled = b.float() * config.scale_of(module)
            parts = [part.removesuffix(".weight") for part in merged_parts(name, self._model)]
            parts = parts or [module]
            for part, rows in zip(parts, scaled.tensor_split(len(parts)), strict=True):
                destination = self._destination(part)
                if destination is not None:
                    layer = _layer_of(destination)
                    assert layer is not None, "_destination found it"
                    stored_by_layer[layer].append((destination, a, rows))
        for layer, stored in stored_by_layer.items():
            yield self._share(layer, stored)
        for number, own in by_layer(experts).items():
            if number in self._experts:
                yield from map(_finite, expert_shares(self._experts[number], own, self._empty))

    def _of_experts(
        self,
        module: ExpertModule,
        factors: _Factors,
        config: AdapterConfig,
        modules: Mapping[str, _Factors],
    ) -> ExpertFactors:
        """Returns the factors of a module of experts, checked."""
        experts = self._experts.get(module.layer)
        name, parameter = module.name, module.projection
        if experts is None:
            self._check_elsewhere(name, f"model.layers.{module.layer}.mlp")
        elif experts.gate_up_room is None:
            raise ValueError(f"it adapts {name}, which needs --lora-experts")
        moe = self._model.config.moe
        if moe is None:
            raise ValueError(f"it adapts {name}, which the model does not have")
        num_stacked = 1
        if module.expert is None:
            is_alone = f"{name}.base_layer" not in modules
            parameter = module.parameter(config, is_alone=is_alone)
            name = f"{name.removesuffix('.base_layer')}.{parameter}"
            num_stacked = moe.num_experts
        a, b = self._checked(module.name, factors, num_stacked * config.rank_of(name))
        scaled = b.float() * config.scale_of(name)
        return ExpertFactors(module=module, parameter=parameter, a=a, b=scaled)

    def _of_vocabulary(
        self, module: str, name: str, factors: _Factors, config: AdapterConfig
    ) -> Iterator[LayerAdapter]:
        """Yields this rank's share of the embedding or the head, if its stage has it."""
        model, is_table = self._model, name == _EMBEDDING
        if not (model.stage.is_first if is_table else model.stage.is_last):
            return
        layer = model.model.embed_tokens if is_table else model.lm_head
        if layer.adapter_a is None:
            raise ValueError(f"it adapts {module}, which needs --lora-embeddings")
        if factors.is_table != is_table:
            raise ValueError(f"it adapts {module} as another kind of layer than it is")
        a, b = factors.stored["A"].float(), factors.stored["B"].float() * config.scale_of(module)
        size = model.config.hidden_size
        by_token, other = (a.T, b.T) if is_table else (b, a)
        check_shape(other, (len(other), size))
        rows = nn.Parameter(self._empty(len(layer.weight), len(a)), requires_grad=False)
        layer.weight_loader(rows, by_token, 0)
        if not is_table:
            yield _finite(LayerAdapter(layer=layer, a=self._copied(a[None]), b=rows.detach()))
            return
        yield _finite(LayerAdapter(layer=layer, a=rows.detach().T[None], b=self._copied(b)))

    def _copied(self, values: torch.Tensor) -> torch.Tensor:
        return self._empty(*values.shape).copy_(values)

    def _destination(self, module: str) -> Destination | None:
        """Returns where a module's weight is; None if another pipeline stage has it."""
        name = renamed(f"{module}.weight", self._model)
        destination = self._destinations.get(name)
        if destination is not None and _layer_of(destination) in self._layers:
            return destination
        if destination is None:
            self._check_elsewhere(module, name)
            return None
        self._check_layer(module, name)
        raise ValueError(f"it adapts {module}, whose adapters are not supported")

    def _check_elsewhere(self, module: str, name: str) -> None:
        """Refuses a module that no pipeline stage has; name: of it, or of a part of its layer."""
        if is_of_another_stage(name, self._model):
            return
        self._check_layer(module, name)
        raise ValueError(f"it adapts {module}, which the model does not have")

    def _check_layer(self, module: str, name: str) -> None:
        layer = _LAYER.search(name)
        num_layers = self._model.config.num_hidden_layers
        if layer is not None and int(layer[1]) >= num_layers:
            raise ValueError(f"it adapts {module}, and the model has {num_layers} layers")

    def _checked(
        self, module: str, factors: _Factors, rank: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the factors of a module, A [r, K] and B [N, r], of a rank r.

        Raises:
            ValueError: one is missing, of a wrong rank or dtype, or holds NaN or infinity.
        """
        missing = next((each for each in "AB" if each not in factors.stored), None)
        if missing is not None:
            raise ValueError(f"tensor {module}.lora_{missing}.weight is missing")
        a, b = factors.stored["A"], factors.stored["B"]
        for factor, values, dim in (("A", a, 0), ("B", b, 1)):
            name = f"tensor {module}.lora_{factor}.weight"
            if values.dtype not in _DTYPES:
                raise ValueError(f"{name} is of {values.dtype}; adapters are of floats")
            if values.dim() != 2 or values.shape[dim] != rank:
                raise ValueError(f"{name} has shape {tuple(values.shape)}, and the rank is {rank}")
            if not bool(values.isfinite().all()):
                raise ValueError(f"{name} holds NaN or infinity")
        return a, b

    def _share(
        self,
        layer: QuantizableLinear,
        stored: Sequence[tuple[Destination, torch.Tensor, torch.Tensor]],
    ) -> LayerAdapter:
        """Puts the factors of a layer's projections together."""
        rank = max(len(a) for _, a, _ in stored)
        num_parts = len(layer.part_sizes)
        share_a = self._empty(num_parts, rank, layer.num_inputs)
        share_b = nn.Parameter(self._empty(sum(layer.part_sizes), rank), requires_grad=False)
        for destination, a, b in stored:
            wide = b.new_zeros(len(b), rank)
            wide[:, : b.shape[1]] = b
            parts = layer.parts_of(destination.shard_id, len(b))
            if len(parts) > 1 and self._num_stored[layer] == num_parts:
                raise ValueError(f"a tensor has {len(b)} rows, those of all projections beside it")
            # Layers arrange rows as those of their weights.
            destination.layer.weight_loader(share_b, wide, destination.shard_id)
            for part in parts:
                share_a[part, : len(a)] = layer.local_inputs(a)
        return _finite(LayerAdapter(layer=layer, a=share_a, b=share_b.detach()))

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=self._model.dtype, device="cpu", pin_memory=self._is_pinned)


def _finite(share: LayerAdapter) -> LayerAdapter:
    """Returns a share whose values the model's dtype can hold.

    Raises:
        ValueError: it cannot.
    """
    if not all(bool(each.isfinite().all()) for each in (share.a, share.b)):
        raise ValueError(f"its values, scaled, exceed {share.b.dtype}")
    return share


def _layer_of(destination: Destination) -> QuantizableLinear | None:
    """Returns the layer of a weight, if it can have adapters."""
    layer = destination.layer
    return layer if isinstance(layer, QuantizableLinear) else None


def _num_elements(layer: QuantizableLinear, rank: int) -> int:
    return rank * (len(layer.part_sizes) * layer.num_inputs + sum(layer.part_sizes))


def _by_module(tensors: Mapping[str, torch.Tensor]) -> dict[str, _Factors]:
    """Returns the factors of each module, by its name in the base model.

    Raises:
        ValueError: there is none, or a tensor is not one of LoRA.
    """
    modules: dict[str, _Factors] = defaultdict(_Factors)
    for name, values in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise ValueError(f"tensor {shown(name)} is no factor of LoRA that is supported")
        factors = modules[match["module"]]
        factor = match["factor"] or match["table_factor"]
        if factor in factors.stored:
            raise ValueError(f"module {match['module']} has two factors {factor}")
        factors.stored[factor] = values
        factors.is_table = match["factor"] is None
    if not modules:
        raise ValueError("it holds no tensors")
    return modules
