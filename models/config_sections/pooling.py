"""How hidden states become one vector: sentence-transformers' files of a checkpoint. No torch."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from models.config_sections.fields import ConfigError, Fields, read_json, shown

Task = Literal["generate", "embed", "score"]
Method = Literal["last", "mean", "cls"]
Activation = Literal["identity", "tanh", "sigmoid"]

MODULES_FILE = "modules.json"
PROMPTS_FILE = "config_sentence_transformers.json"
LENGTH_FILE = "sentence_bert_config.json"
HEAD_TENSOR = "score.weight"
"""The head of transformers' classes for the classification of sequences."""

_METHODS: dict[str, Method] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
_MODES = {
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
"""Flag of 1_Pooling/config.json -> the mode's name in newer files."""
_ACTIVATIONS: dict[str, Activation] = {"Identity": "identity", "Tanh": "tanh", "Sigmoid": "sigmoid"}
_YES, _NO = "yes", "no"


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseConfig:
    """A linear layer on pooled vectors; `folder` has its weights."""

    folder: Path
    in_features: int
    out_features: int
    has_bias: bool
    activation: Activation


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingConfig:
    """The way from a prompt's hidden states to its vector.

    method: takes the last token's state, the mean of all, or the first token's (cls). dense: layers
    after pooling. answers: with task score, the tokens "no" and "yes", whose logits decide; None
    where the checkpoint has a head for one label. activation: of that head's output.
    """

    task: Task
    method: Method = "last"
    dense: tuple[DenseConfig, ...] = ()
    is_normalized: bool = False
    answers: tuple[int, int] | None = None
    activation: Activation = "identity"
    prompts: tuple[tuple[str, str], ...] = ()
    default_prompt_name: str = ""
    max_input_tokens: int | None = None
    """Most tokens of an input; None leaves the model's limit."""

    @property
    def needs_language_head(self) -> bool:
        """Whether logits of tokens are computed."""
        return self.answers is not None

    def size(self, hidden_size: int) -> int:
        """Returns the elements of a vector."""
        if self.task == "score":
            return 1
        return self.dense[-1].out_features if self.dense else hidden_size


def read_pooling(folder: Path, task: Task, answers: Sequence[int] = ()) -> PoolingConfig | None:
    """Reads how a checkpoint's hidden states are pooled; returns None to generate.

    Without sentence-transformers' files the last token's is taken, and normalised to embed.

    Args:
        folder: of the checkpoint.
        task: of the engine.
        answers: the tokens "no" and "yes"; empty: those of tokenizer.json.

    Raises:
        ConfigError: a file is wrong or asks for an unsupported way.
    """
    if task == "generate":
        return None
    if task == "score":
        return _read_score(folder, answers)
    facts = _read_modules(folder)
    if facts is None:
        facts = PoolingConfig(task="embed", is_normalized=True)
    prompts, default = _read_prompts(folder)
    return replace(
        facts,
        prompts=prompts,
        default_prompt_name=default,
        max_input_tokens=_read_max_length(folder),
    )


def _read_modules(folder: Path) -> PoolingConfig | None:
    """Returns the pooling of modules.json; None without the file."""
    path = folder / MODULES_FILE
    if not path.is_file():
        return None
    method: Method | None = None
    dense: list[DenseConfig] = []
    is_normalized = False
    for kind, place in _modules(path):
        match kind:
            case "Transformer":
                pass
            case "Pooling" if method is None:
                method = _read_method(Fields.read(place / "config.json"))
            case "Dense" if method is not None and not is_normalized:
                dense.append(_read_dense(place))
            case "Normalize" if method is not None:
                is_normalized = True
            case _:
                raise ConfigError(
                    f"{path}: the module {kind} is not served in its place; served are "
                    "Transformer, Pooling, Dense and Normalize, in this order"
                )
    if method is None:
        raise ConfigError(f"{path} has no module Pooling")
    return PoolingConfig(
        task="embed", method=method, dense=tuple(dense), is_normalized=is_normalized
    )


def _modules(path: Path) -> list[tuple[str, Path]]:
    """Returns class and folder of each module."""
    listed = read_json(path)
    if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
        raise ConfigError(f"{path} does not hold a list of modules")
    modules = []
    for entry in listed:
        kind, place = entry.get("type"), entry.get("path")
        if not isinstance(kind, str) or not isinstance(place, str):
            raise ConfigError(f"{path}: a module has no type or no path")
        if Path(place).is_absolute() or ".." in Path(place).parts:
            raise ConfigError(f"{path}: the path {shown(place)} leaves the checkpoint's folder")
        modules.append((kind.rpartition(".")[2], path.parent / place))
    return modules


def _read_method(fields: Fields) -> Method:
    modes = [name for flag, name in _MODES.items() if fields.flag(flag)]
    given = fields.values.get("pooling_mode")
    if isinstance(given, str):
        modes = [given]
    if len(modes) != 1 or modes[0] not in _METHODS:
        raise ConfigError(
            f"{fields.file}: pooling of {' and '.join(modes) or 'nothing'} is not served; served "
            f"are {', '.join(_METHODS)}"
        )
    method = _METHODS[modes[0]]
    if method != "last" and not fields.flag("include_prompt", default=True):
        raise fields.error("include_prompt", "true: prompts count like all tokens")
    return method


def _read_dense(folder: Path) -> DenseConfig:
    fields = Fields.read(folder / "config.json")
    return DenseConfig(
        folder=folder,
        in_features=fields.count("in_features"),
        out_features=fields.count("out_features"),
        has_bias=fields.flag("bias", default=True),
        activation=_activation(fields, "activation_function", "tanh"),
    )


def _activation(fields: Fields, name: str, default: Activation) -> Activation:
    """Returns the activation that a field names by its class in torch."""
    if not fields.has(name):
        return default
    given = fields.values[name]
    found = _ACTIVATIONS.get(given.rpartition(".")[2]) if isinstance(given, str) else None
    if found is None:
        raise fields.error(name, f"one of torch's {', '.join(_ACTIVATIONS)}")
    return found


def _read_prompts(folder: Path) -> tuple[tuple[tuple[str, str], ...], str]:
    """Returns the named prompts, and the name of the default one or an empty text."""
    path = folder / PROMPTS_FILE
    if not path.is_file():
        return (), ""
    fields = Fields.read(path)
    prompts = fields.section("prompts").values
    default = fields.values.get("default_prompt_name") or ""
    if not all(isinstance(text, str) for text in prompts.values()):
        raise fields.error("prompts", "an object of texts")
    if not isinstance(default, str) or (default and default not in prompts):
        raise fields.error("default_prompt_name", "one of prompts")
    return tuple(sorted(prompts.items())), default


def _read_max_length(folder: Path) -> int | None:
    path = folder / LENGTH_FILE
    if not path.is_file():
        return None
    fields = Fields.read(path)
    return fields.count("max_seq_length") if fields.has("max_seq_length") else None


def _read_score(folder: Path, answers: Sequence[int]) -> PoolingConfig:
    fields = Fields.read(folder / "config.json")
    if not _has_score_head(fields):
        no, yes = answers or _read_answers(folder / "tokenizer.json")
        return PoolingConfig(task="score", answers=(no, yes))
    labels = fields.section("id2label").values
    count = len(labels) if labels else fields.count("num_labels", 2)
    if count != 1:
        raise ConfigError(
            f"{fields.file}: {fields.architecture()} has {count} labels; --task score serves heads "
            "of one"
        )
    section = fields.section("sentence_transformers")
    return PoolingConfig(task="score", activation=_activation(section, "activation_fn", "sigmoid"))


def needs_answers(folder: Path) -> bool:
    """Returns whether scores of a checkpoint are those of tokens, as it has no head for them.

    Raises:
        ConfigError: config.json is wrong.
    """
    return not _has_score_head(Fields.read(folder / "config.json"))


def _has_score_head(fields: Fields) -> bool:
    return fields.architecture().endswith("ForSequenceClassification")


def _read_answers(path: Path) -> tuple[int, int]:
    try:
        return answers_of(path.read_bytes(), path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def answers_of(tokenizer_json: bytes, path: Path) -> tuple[int, int]:
    """Returns the tokens "no" and "yes" of tokenizer.json, which the service has checked.

    Args:
        tokenizer_json: its content.
        path: of the file, or of what it was made of.

    Raises:
        ConfigError: it has no such tokens.
    """
    try:
        vocabulary = json.loads(tokenizer_json)["model"]["vocab"]
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if isinstance(vocabulary, list):  # of Unigram: pieces with their scores, in order
        vocabulary = {
            each[0]: number
            for number, each in enumerate(vocabulary)
            if isinstance(each, list) and each and isinstance(each[0], str)
        }
    found = []
    for text in (_NO, _YES):
        # SentencePiece's vocabularies may have words with their space alone.
        pieces = (text, f"\u2581{text}") if isinstance(vocabulary, dict) else ()
        token = next((vocabulary[each] for each in pieces if each in vocabulary), None)
        if type(token) is not int:
            raise ConfigError(
                f"{path} has no token {text!r}; --task score takes models that answer yes or no, "
                "or checkpoints with a head for one label"
            )
        found.append(token)
    return found[0], found[1]
