"""Builds networks of transformers from a checkpoint's config.json, without its weights."""

import hashlib
import inspect
import json
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from models.config import (
    CONFIG_FILE,
    ConfigError,
    TransformersConfig,
    read_dtype,
)
from models.config_sections.fields import LARGEST, Fields, shown
from models.config_sections.text_part import TEXT_CLASSES, WRAPPERS
from models.eagle3_config import ARCHITECTURE as EAGLE3
from models.gemma4_assistant_config import ARCHITECTURES as ASSISTANTS
from models.quantization.config import QuantizationConfig
from models.quantization.read import quantization_of
from models.transformers_backend.attention_calls import (
    RECORDING,
    AttentionCall,
    UnsupportedAttentionError,
    describe_mask,
    record_call,
    take_calls,
)
from models.transformers_backend.head import LanguageModelHead
from models.transformers_backend.input_uses import InputUses
from models.transformers_backend.paged_attention import PAGED, PagedAttention, attend_paged, install

_OWN_FIELDS = ("auto_map", "quantization_config")
"""Fields of config.json that transformers never sees: code of others, and formats that we read."""

_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "dense", "sparse"})
"""Kinds of layers without state besides their keys and values."""

_PROBE_TOKENS = 8
_MAX_REASON = 200
"""Most characters of an error of transformers."""

_FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
    ValueError,
)
"""Errors of transformers' code over a config or inputs that it does not expect."""


@dataclass(frozen=True, slots=True)
class Probed:
    """Result of a pass without memory over a network.

    calls: how each layer attends, by the path of the module that does, in order.
    """

    hidden_size: int
    calls: Mapping[str, AttentionCall]


@dataclass(frozen=True, slots=True)
class NetworkSource:
    """The class of a network and its configuration."""

    fields: Fields
    architecture: str
    config: PretrainedConfig
    network: type[PreTrainedModel]

    @classmethod
    def read(cls, folder: Path) -> "NetworkSource":
        """Reads `folder`/config.json.

        Raises:
            ConfigError: transformers has no such decoder, or it needs more than attention.
        """
        fields = Fields.read(folder / CONFIG_FILE)
        architecture = fields.architecture()
        if architecture in (EAGLE3, *ASSISTANTS):
            raise ConfigError(
                f"{fields.file}: {architecture} guesses tokens for another model and is none "
                "itself; name its folder by --draft-model"
            )
        if fields.has("text_config"):
            raise _refused_wrapper(fields)
        if architecture not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
            hint = ""
            if "auto_map" in fields.values:
                hint = ", and code in a checkpoint (auto_map) is never run"
            raise ConfigError(
                f"{fields.file}: architecture {architecture!r} is no decoder that transformers "
                f"{transformers.__version__} knows{hint}"
            )
        network = getattr(transformers, architecture)
        values = {name: each for name, each in fields.values.items() if name not in _OWN_FIELDS}
        try:
            config = network.config_class.from_dict(values)
        except _FAILURES as error:
            reason = error.__cause__ if isinstance(error, StrictDataclassError) else error
            raise ConfigError(
                f"{fields.file}: transformers cannot read it: {_one_line(reason or error)}"
            ) from error
        _leave_out_dynamic(getattr(config, "rope_parameters", None))
        source = cls(fields, architecture, config, network)
        source._check_kind()
        source._check_sizes()
        return source

    @property
    def dtype(self) -> str:
        """Dtype of the stored weights."""
        return read_dtype(self.fields)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a sequence."""
        return self.fields.token_ids("eos_token_id")

    @property
    def quantization(self) -> QuantizationConfig | None:
        """The format of stored weights, if not `dtype`."""
        return quantization_of(self.fields)

    def facts(self) -> TransformersConfig:
        """Returns what the network depends on besides its sizes."""
        content = json.dumps(self.fields.values, sort_keys=True)
        digest = hashlib.sha256(content.encode()).hexdigest()
        return TransformersConfig(version=transformers.__version__, config_sha256=digest)

    def build(self, calls: Mapping[str, AttentionCall], dtype: torch.dtype) -> PreTrainedModel:
        """Returns the network with our attention; torch's current modes make its parameters.

        Args:
            calls: from `probe`.
            dtype: of the parameters.

        Raises:
            ConfigError: transformers refuses the configuration.
        """
        network = self._build(PAGED, dtype)
        for number, (path, call) in enumerate(calls.items()):
            install(network.get_submodule(path), PagedAttention(number, call))
        return network

    def _build(self, attention: str, dtype: torch.dtype) -> PreTrainedModel:
        AttentionInterface.register(PAGED, attend_paged)
        AttentionInterface.register(RECORDING, record_call)
        AttentionMaskInterface.register(RECORDING, describe_mask)
        try:
            built: PreTrainedModel = self.network._from_config(
                self.config, attn_implementation=attention, dtype=dtype
            )
        except KeyError as error:
            if error.args != (attention,):
                raise self._refusal(f"cannot be built: it has no {_one_line(error)}") from error
            raise self._refusal("attends by classes of its own") from error
        except _FAILURES as error:
            raise self._refusal(f"cannot be built: {_one_line(error)}") from error
        _use_parameters(built)
        return built.eval().requires_grad_(requires_grad=False)

    def probe(self) -> Probed:
        """Runs the network over tensors without memory.

        Raises:
            ConfigError: it does not attend in a way that our operator computes.
        """
        with torch.device("meta"), torch.no_grad():
            network = self._build(RECORDING, torch.bfloat16)
            self._check_modules(network)
            return self._run(network)

    def _run(self, network: PreTrainedModel) -> Probed:
        shape = (1, _PROBE_TOKENS)
        positions = torch.arange(_PROBE_TOKENS, device="meta").unsqueeze(0)
        uses = InputUses(positions)
        try:
            with uses:
                hidden = undecorated_forward(network)(
                    network.base_model,
                    input_ids=torch.zeros(shape, dtype=torch.int64, device="meta"),
                    position_ids=positions,
                    attention_mask=torch.ones(shape, dtype=torch.int64, device="meta"),
                    use_cache=False,
                ).last_hidden_state
            LanguageModelHead(network)(hidden.squeeze(0))
        except UnsupportedAttentionError as error:
            raise self._refusal(str(error)) from error
        except _FAILURES as error:
            raise self._refusal(
                f"ends with {type(error).__name__} in {_place(error)} when it runs over tensors "
                "without values or padding"
            ) from error
        calls = take_calls(network)
        num_layers = self.config.num_hidden_layers
        if len(calls) != num_layers:
            raise self._refusal(
                f"attends in {len(calls)} of its {num_layers} layers through transformers' "
                "attention interface; all must"
            )
        most = max(len(made) for made in calls.values())
        if most > 1:
            raise self._refusal(f"attends {most} times in a layer, not once")
        if not uses.count:
            raise self._refusal("counts positions by itself, and passes over given ones")
        return Probed(hidden.shape[-1], {path: made[0] for path, made in calls.items()})

    def _check_sizes(self) -> None:
        """Raises ConfigError if a size would take too long to build."""
        for name, largest in LARGEST.items():
            try:
                value = getattr(self.config, name, None)
            except RuntimeError:  # each layer has one of its own, and the probe sees them all
                continue
            if isinstance(value, int) and value > largest:
                raise ConfigError(f"{self.fields.file}: {name} is {value}; the limit is {largest}")
        for name in ("vocab_size", "num_hidden_layers", "max_position_embeddings"):
            value = getattr(self.config, name, None)
            if type(value) is not int or value < 1:
                raise self._refusal(f"has no {name}")

    def _check_kind(self) -> None:
        """Raises ConfigError if the configuration is of more than a decoder with attention."""
        config: Any = self.config
        if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
            raise self._refusal("has cross attention")
        if getattr(self.network, "_is_stateful", False):
            kind = self._stateful_kind()
            raise self._refusal(f"keeps a state that is not keys and values, in its {kind}")
        kinds = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
        if kinds:
            raise self._refusal(f"has layers of kind {', '.join(sorted(map(str, kinds)))}")
        for section in _ropes(getattr(config, "rope_parameters", None)):
            if section.get("rope_type") == "longrope":
                raise self._refusal("turns positions by the longest sequence of a batch (longrope)")

    def _stateful_kind(self) -> str:
        """Returns the class of the network's first module whose parameters no torch module has."""
        try:
            with torch.device("meta"), torch.no_grad():
                network = self.network._from_config(self.config)
        except _FAILURES:
            return "layers"
        for module in network.modules():
            name, is_torch = type(module).__name__, type(module).__module__.startswith("torch.")
            has_own = next(module.parameters(recurse=False), None) is not None
            if has_own and not is_torch and "Norm" not in name:
                return name
        return "layers"

    def _check_modules(self, network: nn.Module) -> None:
        """Raises ConfigError if a layer mixes tokens by other means than attention."""
        for path, module in network.named_modules():
            if isinstance(module, (nn.Conv1d, nn.RNNBase)):
                raise self._refusal(f"mixes tokens in {path}, a {type(module).__name__}")

    def _refusal(self, reason: str) -> ConfigError:
        return ConfigError(
            f"{self.fields.file}: {self.architecture} of transformers {transformers.__version__} "
            f"{reason}; its modules cannot be served"
        )


def undecorated_forward(network: PreTrainedModel) -> Callable[..., Any]:
    """Returns the forward of a network's decoder, as a function of the decoder.

    Its decorators collect the outputs of layers by side effects, which no trace may have.
    """
    forward: Callable[..., Any] = inspect.unwrap(type(network.base_model).forward)
    return forward


def _refused_wrapper(fields: Fields) -> ConfigError:
    """Returns the error about a model whose text part nothing here runs."""
    text_type = fields.section("text_config").values.get("model_type")
    # The text alone may be served, such as that of a model with sound.
    reason = "which is not served"
    if isinstance(text_type, str) and text_type in TEXT_CLASSES:
        reason = "beside parts that are not served"
    return ConfigError(
        f"{fields.file}: {fields.architecture()} holds text of model_type {shown(text_type)}, "
        f"{reason}; the text part is served of {', '.join(WRAPPERS)}"
    )


def _use_parameters(network: nn.Module) -> None:
    """Makes parameters of all that checkpoints store, buffers included, without values.

    Shared ones stay shared.
    """
    made: dict[Tensor, nn.Parameter] = {}
    for module in network.modules():
        unstored = module._non_persistent_buffers_set
        buffers = {name: each for name, each in module._buffers.items() if name not in unstored}
        for name, values in [*module._parameters.items(), *buffers.items()]:
            if values is None:
                continue
            if values not in made:
                made[values] = nn.Parameter(values.to("meta"), requires_grad=False)
            delattr(module, name)
            module.register_parameter(name, made[values])


def _leave_out_dynamic(parameters: Any) -> None:
    """Makes rotary positions plain whose scaling begins past the longest sequence."""
    for section in _ropes(parameters):
        if section.get("rope_type") == "dynamic":
            section["rope_type"] = "default"


def _ropes(parameters: Any) -> list[dict[str, Any]]:
    """Returns the rotary positions, of one kind for all layers or of one for each kind."""
    if not isinstance(parameters, dict):
        return []
    return [each for each in parameters.values() if isinstance(each, dict)] or [parameters]


def _place(error: BaseException) -> str:
    """Returns the last function of transformers in an error's trace, with its file."""
    frames = [
        each
        for each in traceback.extract_tb(error.__traceback__)
        if "transformers" in Path(each.filename).parts
    ]
    return f"{frames[-1].name} of {Path(frames[-1].filename).name}" if frames else "its code"


def _one_line(error: BaseException) -> str:
    """Returns the start of an error's text in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _MAX_REASON else f"{text[:_MAX_REASON]} ..."
