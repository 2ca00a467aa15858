"""Reads the facts of a checkpoint that the service process needs, without torch."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from models.config import ConfigError, ModelConfig, ModelImpl
from models.config_sections.fields import MAX_FILE_BYTES, Fields, shown
from models.config_sections.pooling import PoolingConfig, Task, read_pooling
from services.engine.checkpoint.image_input import ImageInput
from services.engine.checkpoint.model_config import read_model_config
from services.engine.checkpoint.model_files import ModelFolderError, read_bounded
from services.engine.checkpoint.tokenizer_files import (
    TokenizerFiles,
    check_token_ids,
    end_token_id,
)
from services.engine.errors import InvalidRequestError
from services.engine.request import MAX_EOS_TOKEN_IDS, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultSampling:
    """Defaults for fields that a request leaves out: generation_config.json's, else neutral."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A checkpoint's name, limits, end-of-sequence ids, default sampling and tokenizer."""

    name: str
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    default_sampling: DefaultSampling
    tokenizer: TokenizerFiles
    config_sha256: str
    """Of config.json, hexadecimal."""
    config: ModelConfig
    image_input: ImageInput | None = None
    """The images that it takes; None if it sees none, or is served for text alone."""
    pooling: PoolingConfig | None = None
    """The way to a prompt's vector, where requests get one and no tokens; None to generate."""

    @property
    def max_prompt_len(self) -> int:
        """Most tokens of a prompt: one token of output must fit after it, but no vector."""
        return self.max_model_len - (self.pooling is None)

    @property
    def tokenizer_json(self) -> bytes:
        """Content of tokenizer.json."""
        [content] = [f.content for f in self.tokenizer.files if f.name == "tokenizer.json"]
        return content

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        name: str,
        max_model_len: int | None,
        num_layer_drafts: int = 0,
        model_impl: ModelImpl = "auto",
        max_image_tokens: int = 0,
        task: Task = "generate",
        score_tokens: Sequence[int] = (),
    ) -> "ModelFolder":
        """Reads a folder in Hugging Face form.

        Args:
            folder: holds config.json, the tokenizer's files and possibly generation_config.json.
            name: the model's name in requests.
            max_model_len: a limit below the model's own, in tokens; None keeps the model's.
            num_layer_drafts: draft tokens of draft layers; above 0 the model needs some.
            model_impl: whose modules run the model.
            max_image_tokens: most tokens of an image; 0 serves the model for text alone.
            task: what requests get.
            score_tokens: ids of the answers no and yes; empty: those of tokenizer.json.

        Raises:
            ModelFolderError: a file is missing or broken, asks for unsupported features or has a
                value out of range, or the limit is above the model's.
        """
        if not folder.is_dir():
            raise ModelFolderError(
                f"{folder} is not a folder; --model takes one, or OWNER/NAME from the hub"
            )
        try:
            config = read_model_config(folder, model_impl, sees_images=max_image_tokens > 0)
            pooling = read_pooling(folder, task, score_tokens)
            if pooling is None:
                config.require_head()
            if num_layer_drafts:
                config.require_draft_layers()
        except ConfigError as error:
            raise ModelFolderError(str(error)) from error
        if max(score_tokens, default=0) >= config.vocab_size:
            raise ModelFolderError(
                f"--score-tokens has {max(score_tokens)}; the model has {config.vocab_size} tokens"
            )
        generation_path = folder / "generation_config.json"
        generation = _read_json(generation_path) if generation_path.is_file() else {}
        fields = Fields(generation_path, generation)
        try:
            tokenizer = TokenizerFiles.from_folder(folder)
        except OSError as error:
            raise ModelFolderError(f"{error.filename} cannot be read: {error.strerror}") from error
        if "tokenizer.json" not in {file.name for file in tokenizer.files}:
            raise ModelFolderError(
                f"{folder} has no tokenizer.json, tekken.json, tiktoken.model or tokenizer.model"
            )
        check_token_ids(tokenizer, folder, config.vocab_size)
        try:
            default_sampling = _default_sampling(fields)
            eos_token_ids = _eos_token_ids(fields, config, tokenizer)
            image_input = ImageInput.of(config, folder, max_vectors=max_image_tokens)
        except ConfigError as error:
            raise ModelFolderError(str(error)) from error
        return cls(
            name=name,
            architecture=config.architecture,
            vocab_size=config.vocab_size,
            max_model_len=_max_model_len(config.max_position_embeddings, max_model_len),
            eos_token_ids=eos_token_ids,
            default_sampling=default_sampling,
            tokenizer=tokenizer,
            config_sha256=config_sha256(folder),
            config=config,
            image_input=image_input,
            pooling=pooling,
        )


def config_sha256(folder: Path) -> str:
    """Returns the SHA-256 of a checkpoint's config.json, in hexadecimal."""
    return hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(read_bounded(path, MAX_FILE_BYTES))
    except (ValueError, RecursionError) as error:
        raise ModelFolderError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelFolderError(f"{path} does not hold a JSON object")
    return value


def _max_model_len(own: int, wanted: int | None) -> int:
    if wanted is not None and wanted > own:
        raise ModelFolderError(f"--max-model-len is {wanted}; the model's limit is {own} tokens")
    return own if wanted is None else wanted


def _eos_token_ids(
    generation: Fields, config: ModelConfig, tokenizer: TokenizerFiles
) -> frozenset[int]:
    """Returns the ids that end a sequence.

    generation_config.json overrides config.json. The tokenizer's own end counts too: fine-tuned
    models may have changed it there alone.
    """
    name = "eos_token_id"
    own_ids = generation.token_ids(name) if generation.has(name) else config.eos_token_ids
    ids = frozenset(own_ids)
    own = end_token_id(tokenizer)
    if own is not None and own < config.vocab_size and len(ids) < MAX_EOS_TOKEN_IDS:
        ids |= {own}
    # The worker's tables hold no more, and it refuses ids above the vocabulary.
    if len(ids) > MAX_EOS_TOKEN_IDS or max(ids, default=0) >= config.vocab_size:
        raise ModelFolderError(
            f"eos_token_id is {shown(sorted(ids))}; it may have {MAX_EOS_TOKEN_IDS} ids, "
            f"all below vocab_size, which is {config.vocab_size}"
        )
    return ids


def _default_sampling(generation: Fields) -> DefaultSampling:
    """Returns generation_config.json's sampling; greedy if do_sample is false."""
    temperature = generation.number("temperature", 1.0, or_zero=True)
    defaults = DefaultSampling(
        temperature=temperature if generation.flag("do_sample", default=True) else 0.0,
        # Some write -1 for all tokens, as vLLM does.
        top_k=max(generation.count("top_k", 0, minimum=-1), 0),
        top_p=generation.number("top_p", 1.0),
        min_p=generation.number("min_p", 0.0, or_zero=True),
        repetition_penalty=generation.number("repetition_penalty", 1.0),
    )
    try:
        SamplingParams(**asdict(defaults), seed=0, max_tokens=1)
    except InvalidRequestError as error:
        raise ModelFolderError(f"{generation.file}: {error}") from error
    return defaults
