"""Loads a model that is ready to run from a checkpoint folder."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from models.config import ConfigError, ModelConfig, ModelImpl
from models.config_sections.pooling import PoolingConfig
from models.deepseek_mtp import append_draft_layers
from models.layers.decoder import CausalLM
from models.layers.draft_layer import DraftInputs
from models.layers.experts import Experts
from models.layers.quantization import QuantizableLinear
from models.layers.weight import WeightFormat, described_weight
from models.loading.checkpoint import CheckpointTensor, open_checkpoint
from models.loading.dummy import fill_with_random_weights
from models.loading.fit import check_fit, check_room
from models.loading.model_config import read_model_config
from models.loading.packed_weights import find_packed
from models.loading.plan import Load, plan_loads
from models.loading.pooling_head import load_pooling_head
from models.loading.stored_formats import ALL_KINDS, keep_stored_formats, kept_kinds
from models.loading.stored_tensors import by_model_name
from models.loading.weights import load_weights
from models.loading.without_storage import WithoutStorage
from models.number_formats import FP8, MXFP4
from models.parallel.group import SINGLE, ParallelGroup
from models.quantization.config import QuantizationConfig
from models.registry import make_tower, model_class

MAX_FULL_TABLE = 2**20
"""Most positions whose rotations are all kept, even for short sequences."""

RANDOM = "random"
"""Stored format of weights that no checkpoint has."""


def load_model(  # noqa: PLR0913  # one call site, and each is a fact of its own
    folder: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    load_format: str = "safetensors",
    rounds_to_fp8: bool = False,
    model_impl: ModelImpl = "auto",
    group: ParallelGroup = SINGLE,
    keep_quantized: bool | None = None,
    with_draft_layers: bool = False,
    sees_images: bool = False,
    pooling: PoolingConfig | None = None,
    max_positions: int | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> CausalLM:
    """Builds the model that `folder`/config.json describes and loads its weights.

    The model is in eval mode, and no parameter requires a gradient.

    Args:
        folder: the checkpoint, in Hugging Face form.
        device: of the parameters.
        dtype: of parameters and activations.
        load_format: "safetensors", or "dummy" for seeded random weights.
        rounds_to_fp8: whether the weights of linear layers and experts become FP8, with a scale per
            row, while they load.
        model_impl: whose modules run; see `models.loading.model_config`.
        group: the ranks that share the model.
        keep_quantized: whether weights stored in 8 or 4 bits stay so where there are products for
            them; None: as the device can.
        with_draft_layers: whether models.deepseek_mtp will use the draft layers.
        sees_images: whether the encoder of images is loaded, if the model has one.
        pooling: makes vectors of hidden states; None for a model that generates.
        max_positions: longest sequence, in tokens; by default the model's. Models that allow more
            than MAX_FULL_TABLE get a table of positions of this length.
        on_progress: called at intervals with one line for the operator.

    Raises:
        ConfigError: config.json is missing, wrong, or names an unsupported model; or weights that
            are quantised already should be rounded.
        CheckpointError: the weights are missing, damaged, or do not fit.
        ValueError: unknown load_format, or the group cannot share the model.
    """
    if load_format not in ("safetensors", "dummy"):
        raise ValueError(f"load_format is {load_format!r}; it must be safetensors or dummy")
    config = config_to_load(
        read_model_config(folder, model_impl, sees_images=sees_images),
        folder,
        rounds_to_fp8=rounds_to_fp8,
        pooling=pooling,
        max_positions=max_positions,
    )
    if group.enable_expert_parallel and (config.moe is None or config.transformers is not None):
        raise ConfigError(
            f"{folder}: --enable-expert-parallel needs a model with experts that Octavo's own "
            f"modules run; {config.architecture} is not one"
        )
    tensors = open_checkpoint(folder) if load_format == "safetensors" else None
    with tensor_defaults(device, dtype), torch.no_grad():
        with WithoutStorage():
            model = _build(folder, config, group, dtype)
            if with_draft_layers:
                append_draft_layers(model, group)
        stored = None if tensors is None else by_model_name(tensors, model)
        if with_draft_layers:
            share_with_draft_layers(model, stored)
        quantization = config.quantization
        packed = {} if stored is None else find_packed(stored, quantization, dtype)
        if quantization is not None:
            kinds = ALL_KINDS if keep_quantized else kept_kinds(device, dtype, quantization)
            if keep_quantized is not False:
                keep_stored_formats(model, stored, packed, kinds)
        if stored is None:
            _give_storage(model, device)
            model.weight_formats = weight_formats((), model)
            fill_with_random_weights(model)
        else:
            # Finds wrong sizes in config.json before memory is allocated for them.
            loads = plan_loads(stored, packed, model, dtype)
            check_fit(loads, model)
            check_room(model, device)
            params = _give_storage(model, device)
            loads = [own.into(params) for load in loads for own in load.of_this_rank()]
            model.weight_formats = weight_formats(loads, model)
            is_shared = group.of_experts.size > 1  # attention is not, on data-parallel ranks
            load_weights(loads, device, on_progress or _ignore_progress, is_shared=is_shared)
    if pooling is not None:
        model.pooling = load_pooling_head(pooling, model, tensors, device)
    return model.eval()


def config_to_load(
    config: ModelConfig,
    folder: Path,
    *,
    rounds_to_fp8: bool,
    max_positions: int | None,
    pooling: PoolingConfig | None = None,
) -> ModelConfig:
    """Returns the configuration of the model that `load_model` makes; arguments are those of it.

    config: of the folder.
    """
    is_without_head = pooling is not None and not pooling.needs_language_head
    if is_without_head and config.transformers is None:
        config = config.without_head()
    if rounds_to_fp8:
        if config.quantization is not None:
            raise ConfigError(
                f"{folder}: quantization fp8 needs a plain checkpoint; this one is quantised "
                f"by {config.quantization.method}"
            )
        config = replace(config, quantization=QuantizationConfig.rounding_to_fp8())
    if max_positions is None or config.transformers is not None:
        return config
    config = config.with_longest(max_positions)
    if config.max_position_embeddings <= MAX_FULL_TABLE:
        return config
    num_positions = min(max_positions, config.max_position_embeddings)
    return replace(config, max_position_embeddings=num_positions)


def _build(folder: Path, config: ModelConfig, group: ParallelGroup, dtype: torch.dtype) -> CausalLM:
    """Returns the model of a configuration, without values."""
    if config.transformers is None:
        model = model_class(config.architecture)(config, group)
        if config.vision is not None:
            model.visual = make_tower(config.vision)
        return model
    if group.stage.size > 1:
        raise ConfigError(
            f"{folder}: --pipeline-parallel-size is {group.stage.size}, and a model that runs as "
            "modules of transformers cannot be split into stages"
        )
    from models.transformers_backend.model import build_transformers_model

    return build_transformers_model(folder, config, group, dtype)


def _give_storage(model: CausalLM, device: torch.device) -> dict[nn.Parameter, nn.Parameter]:
    """Allocates the parameters that were made without memory; shared ones stay shared.

    Returns:
        The parameter that replaces each.
    """
    assert not any(buffer.is_meta for buffer in model.buffers()), "buffers have their values"
    allocated: dict[nn.Parameter, nn.Parameter] = {}
    for layer in model.modules():
        for name, param in layer.named_parameters(recurse=False):
            if param not in allocated:
                # empty_like of such a tensor imports sympy, which takes 2 s (torch 2.11, 2.13).
                values = torch.empty(param.shape, dtype=param.dtype, device=device)
                allocated[param] = nn.Parameter(values, requires_grad=False)
            setattr(layer, name, allocated[param])
    return allocated


@contextmanager
def tensor_defaults(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Makes new tensors on `device` and of `dtype`, for the length of the block."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(previous)


def _ignore_progress(line: str) -> None:
    """Does nothing with a line of progress."""


def share_with_draft_layers(model: CausalLM, stored: Mapping[str, CheckpointTensor] | None) -> None:
    """Gives draft layers the model's embedding and head, unless the checkpoint has others.

    Released checkpoints repeat both in each draft layer. They are compared, because a second copy
    would double their memory. The model has no weights yet; stored is None without a checkpoint.
    """
    stored = stored or {}
    embedding = "model.embed_tokens.weight"
    head = embedding if model.config.tie_word_embeddings else "lm_head.weight"
    for index, layer in enumerate(model.model.layers):
        if not isinstance(layer, DraftInputs):
            continue
        prefix = f"model.layers.{index}"
        if _repeats(stored, f"{prefix}.embed_tokens.weight", embedding):
            layer.embed_tokens = None
        if _repeats(stored, f"{prefix}.shared_head.head.weight", head):
            layer.shared_head.head = None


def _repeats(stored: Mapping[str, CheckpointTensor], name: str, original: str) -> bool:
    """Returns whether a tensor is not stored, or equals another one."""
    if name not in stored:
        return True
    if original not in stored:
        return False  # the loader reports it as missing
    return torch.equal(stored[name].values, stored[original].values)


def weight_formats(loads: Sequence[Load], model: CausalLM) -> tuple[WeightFormat, ...]:
    """Returns one entry for each pair of a stored and a kept format, largest first.

    Embedding, head, routers, norms and biases count too. Scales count with their weights.
    """
    stored: dict[nn.Parameter, set[str]] = defaultdict(set)
    for load in loads:
        stored[load.destination.param].add(load.stored_as)
    totals: dict[tuple[str, str, bool], list[int]] = defaultdict(lambda: [0, 0])
    seen: set[nn.Parameter] = set()
    for layer in model.modules():
        for name, param in layer.named_parameters(recurse=False):
            if param in seen:
                continue
            seen.add(param)
            weight = layer.get_parameter(described_weight(layer, name))
            kept, rounds = _kept_format(layer, weight)
            entry = totals[" and ".join(sorted(stored[weight])) or RANDOM, kept, rounds]
            entry[0] += param is weight
            entry[1] += param.nbytes
    formats = [
        WeightFormat(stored=key[0], kept=key[1], rounds_activations=key[2], count=count, bytes=size)
        for key, (count, size) in totals.items()
    ]
    return tuple(sorted(formats, key=lambda each: -each.bytes))


def _kept_format(layer: nn.Module, weight: nn.Parameter) -> tuple[str, bool]:
    """Returns the format of a weight on its device, and whether its product rounds activations."""
    if isinstance(layer, QuantizableLinear) and weight is layer.weight:
        kept_as = layer.method.kept_as
        if kept_as is not None:
            return kept_as, weight.dtype == FP8
    if isinstance(layer, Experts) and weight.dtype in (FP8, MXFP4):
        if weight.dtype == MXFP4:
            return ("mxfp4" if layer.packing is None else layer.packing.describe()), False
        scale = layer.down_proj_scale
        is_by_row = scale is not None and scale.shape[1:] == (layer.down_proj.shape[1], 1)
        return ("fp8 rows" if is_by_row else "fp8 blocks of 128 x 128"), True
    return str(weight.dtype).removeprefix("torch."), False
