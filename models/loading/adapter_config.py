"""Reads adapter_config.json, which PEFT writes beside an adapter's weights."""

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from models.config_sections.fields import ConfigError, Fields

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MAX_RANK = 256
"""Largest rank of an adapter."""
MAX_PATTERNS = 4096
"""Most modules with a rank or an alpha of their own."""
MAX_PATTERN_LENGTH = 512

_REFUSED_FLAGS = {
    "use_dora": "DoRA, which scales each column of the weights",
    "fan_in_fan_out": "weights stored with rows and columns exchanged",
    "lora_bias": "a bias of its own",
    "use_qalora": "QALoRA",
}
_REFUSED_PARTS = {
    "modules_to_save": "whole modules that replace the model's",
    "layer_replication": "repeated layers",
    "trainable_token_indices": "token vectors of its own",
    "alora_invocation_tokens": "tokens that turn it on",
    "arrow_config": "a router of adapters",
    "eva_config": "weights initialised from data",
    "corda_config": "a changed base model",
    "loftq_config": "a changed base model",
}
"""Fields whose presence changes what an adapter computes -> what they mean."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of ways to initialise that change the base model, unless PEFT converts the adapter."""
_PLAIN = re.compile(r"[\w.]+")
_ANY_PARENT = r".*\."


class ModuleValues:
    """Values of some modules, by the ends of their names.

    Hostile files have hundreds of thousands of modules and thousands of names, so a value is found
    by the ends of a module's name, and names are not tried one after the other.
    """

    def __init__(self, values: Mapping[str, float]) -> None:
        """Takes values by name; of several with which a module's name ends the first counts."""
        self._ordered = {name: (place, values[name]) for place, name in enumerate(values)}
        self._most_dots = max((name.count(".") for name in values), default=-1)

    @property
    def all(self) -> list[float]:
        """Every value."""
        return [value for _, value in self._ordered.values()]

    def of(self, module: str, default: float) -> float:
        """Returns the value of the first name with which a module's name ends, as PEFT does."""
        found = []
        start = len(module)
        for _ in range(self._most_dots + 1):
            start = module.rfind(".", 0, start)
            if len(module) - start > MAX_PATTERN_LENGTH + 1:
                break
            known = self._ordered.get(module[start + 1 :])
            if known is not None:
                found.append(known)
            if start < 0:
                break
        return min(found)[1] if found else default


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """Ranks and scales of an adapter's modules."""

    rank: int
    alpha: float
    is_rank_stabilized: bool
    """Whether products are divided by the root of the rank (rsLoRA)."""
    ranks: ModuleValues
    alphas: ModuleValues
    target_parameters: tuple[str, ...] = ()
    """Names of the parameters that are adapted without a module of their own."""

    @classmethod
    def read(cls, folder: Path) -> "AdapterConfig":
        """Reads the file of an adapter's folder.

        Raises:
            ConfigError: it is missing, malformed, or asks for an unsupported feature.
        """
        fields = Fields.read(folder / CONFIG_FILE)
        fields.choice("peft_type", ("LORA",), "LORA")
        fields.choice("bias", ("none",), "none")
        for name, meaning in _REFUSED_FLAGS.items():
            if fields.flag(name):
                raise ConfigError(f"{fields.file}: {name} is true: {meaning} is not supported")
        for name, meaning in _REFUSED_PARTS.items():
            if fields.values.get(name):
                raise ConfigError(f"{fields.file}: {name} is set: {meaning} are not supported")
        start = fields.values.get("init_lora_weights")
        if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
            raise ConfigError(
                f"{fields.file}: init_lora_weights is {start[:40]!r}: the adapter belongs to a "
                "changed base model; save it converted, with path_initial_model_for_weight_"
                "conversion of PEFT"
            )
        ranks, alphas = (_pattern(fields, name) for name in ("rank_pattern", "alpha_pattern"))
        return cls(
            rank=_rank(fields, "r"),
            alpha=fields.number("lora_alpha", 8.0),
            is_rank_stabilized=fields.flag("use_rslora"),
            ranks=ModuleValues({_plain(name): _rank(ranks, name) for name in ranks.values}),
            alphas=ModuleValues({_plain(name): alphas.number(name) for name in alphas.values}),
            target_parameters=_parameters(fields),
        )

    @property
    def max_rank(self) -> int:
        """The largest rank of a module."""
        return int(max((self.rank, *self.ranks.all)))

    def rank_of(self, module: str) -> int:
        """Returns the rank of a module."""
        return int(self.ranks.of(module, self.rank))

    def scale_of(self, module: str) -> float:
        """Returns the factor of a module's product.

        Source: Kalajdzievski 2023, "A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA".
        """
        rank = self.rank_of(module)
        alpha = self.alphas.of(module, self.alpha)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)


def _pattern(fields: Fields, name: str) -> Fields:
    """Returns values by names of modules; PEFT allows expressions, which are refused."""
    pattern = fields.section(name)
    if len(pattern.values) > MAX_PATTERNS:
        raise fields.error(name, f"an object of at most {MAX_PATTERNS} modules")
    for each in pattern.values:
        if len(each) > MAX_PATTERN_LENGTH or _PLAIN.fullmatch(_plain(each)) is None:
            raise ConfigError(
                f"{fields.file}: {name} has {each[:80]!r}: only plain names of modules are "
                "supported, not expressions"
            )
    return pattern


def _plain(pattern: str) -> str:
    """Returns a pattern without the beginning that PEFT gives patterns of stacked experts."""
    return pattern.removeprefix(_ANY_PARENT)


def _parameters(fields: Fields) -> tuple[str, ...]:
    """Returns the last parts of the names in target_parameters."""
    names = fields.values.get("target_parameters") or []
    if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
        raise fields.error("target_parameters", "a list of names")
    return tuple(sorted({each.rpartition(".")[2] for each in names}))


def _rank(fields: Fields, name: str) -> int:
    rank = fields.count(name)
    if rank > MAX_RANK:
        raise fields.error(name, f"at most {MAX_RANK}")
    return rank


def digest_of(folder: Path, weights: bytes) -> bytes:
    """Returns the SHA-256 by which an adapter is known, of both files; `weights` is the second.

    Raises:
        OSError: the configuration cannot be read.
    """
    digest = hashlib.sha256((folder / CONFIG_FILE).read_bytes())
    digest.update(weights)
    return digest.digest()
