"""Brings a model's files from the hub into its cache on this machine."""

import contextlib
import json
import re
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx2
import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from services.hub.gguf_files import SUFFIX, choose_files
from services.hub.names import HubError, HubName
from services.hub.progress import Report, bar_class
from services.hub.weights import fetch_files

CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SMALL_FILES = (
    CONFIG_FILE,
    INDEX_FILE,
    "*_Dense/config.json",
    "*_Dense/model.safetensors",
    "*_Pooling/config.json",
    "added_tokens.json",
    "additional_chat_templates/default.jinja",
    "additional_chat_templates/tool_use.jinja",
    "chat_template.jinja",
    "config_sentence_transformers.json",
    "generation_config.json",
    "hf_quant_config.json",
    "modules.json",
    "preprocessor_config.json",
    "processor_config.json",
    "sentence_bert_config.json",
    "special_tokens_map.json",
    TOKENIZER_FILE,
    "tokenizer_config.json",
)
"""Patterns of everything but the model's own weights that an engine reads of a checkpoint."""
OTHER_TOKENIZER_FILES = ("tekken.json", "tiktoken.model", "tokenizer.model")
"""Files that it reads where there is no tokenizer.json."""

_WEIGHTS_NAME = re.compile(r"[\w.-]+\.safetensors")
_MAX_INDEX_BYTES = 2**26


def fetch(name: HubName, *, has_weights: bool = True, gguf_file: str = "", report: Report) -> Path:
    """Returns the folder of a model, or its GGUF file, after bringing the files that it lacks.

    The files of an interrupted call are kept, and the next call goes on from there. Without the
    hub, a complete copy in the cache is enough. HF_HOME, HF_HUB_OFFLINE, HF_TOKEN, HF_ENDPOINT and
    the library's other variables hold. Only the main thread may call it.

    Args:
        name: of the model.
        has_weights: also bring the weights: safetensors or GGUF only, pickled ones never.
        gguf_file: the GGUF file to bring, or its first shard; empty: the only one, where there is
            no config.json.
        report: takes the progress of the current files.

    Raises:
        HubError: the model is absent, gated, incomplete or has no safetensors, or the hub cannot be
            reached and the cache has no complete copy.
    """
    huggingface_hub.logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # its own
    with _ended_by_ctrl_c():
        return _fetch(name, has_weights=has_weights, gguf_file=gguf_file, report=report)


def _fetch(name: HubName, *, has_weights: bool, gguf_file: str, report: Report) -> Path:
    try:
        folder = _fetch_small(name.repository, name.revision, SMALL_FILES)
        if gguf_file or not (folder / CONFIG_FILE).is_file():
            return _fetch_gguf(name, folder, gguf_file, report)
        if not (folder / TOKENIZER_FILE).is_file():
            # By its commit: the branch may have moved since.
            folder = _fetch_small(name.repository, folder.name, OTHER_TOKENIZER_FILES)
        if has_weights:
            files = _weight_files(folder, name)
            # By its commit: the branch may have moved since the index was read.
            fetch_files(name, folder, files, report)
    except RemoteEntryNotFoundError as error:
        raise HubError(_describe_absence(name, folder)) from error
    except (
        HFValidationError,
        HfHubHTTPError,
        httpx2.HTTPError,
        RuntimeError,
        OSError,
    ) as error:
        raise HubError(_describe(name, error)) from error
    return folder


def _fetch_small(repository: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """Returns the folder of a model, after bringing its files that match a pattern."""
    folder = huggingface_hub.snapshot_download(
        repository,
        revision=revision,
        allow_patterns=list(patterns),
        tqdm_class=bar_class(_ignore, 0),
    )
    return Path(folder)


def _fetch_gguf(name: HubName, folder: Path, gguf_file: str, report: Report) -> Path:
    """Returns the first file of a GGUF model, after bringing all its shards."""
    if constants.HF_HUB_OFFLINE:
        names = [path.relative_to(folder).as_posix() for path in folder.rglob(f"*{SUFFIX}")]
    else:
        names = huggingface_hub.list_repo_files(name.repository, revision=folder.name)
    if not gguf_file and not any(file.endswith(SUFFIX) for file in names):
        raise HubError(f"{name} has no {CONFIG_FILE} and no GGUF model: it is no checkpoint")
    files = choose_files(str(name), names, gguf_file)
    fetch_files(name, folder, files, report)
    return folder / files[0]


@contextlib.contextmanager
def _ended_by_ctrl_c() -> Iterator[None]:
    """Lets Ctrl-C end the process at once: the library would finish its files first."""
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _weight_files(folder: Path, name: HubName) -> tuple[str, ...]:
    """Returns the names of the files that hold the weights: the index's, else the only one."""
    index_file = folder / INDEX_FILE
    if not index_file.is_file():
        return (SINGLE_FILE,)
    if index_file.stat().st_size > _MAX_INDEX_BYTES:
        raise HubError(f"{name}: {INDEX_FILE} has more than {_MAX_INDEX_BYTES} bytes")
    try:
        files = set(json.loads(index_file.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise HubError(f"{name}: {INDEX_FILE} has no readable weight_map") from error
    for file in files:
        if not isinstance(file, str) or not _WEIGHTS_NAME.fullmatch(file):
            raise HubError(f"{name}: {INDEX_FILE} names {file!r}, which is no safetensors file")
    return tuple(sorted(files))


def _describe_absence(name: HubName, folder: Path) -> str:
    """Says that a file with weights is not in the repository."""
    if (folder / INDEX_FILE).is_file():
        return f"{name}: {INDEX_FILE} names a file that the hub does not have"
    return (
        f"{name} has neither {SINGLE_FILE} nor {INDEX_FILE} on the hub; of other formats, GGUF is "
        "loaded where --gguf-file names the file, and .bin and .pt are not"
    )


def _ignore(num_bytes: int, total_bytes: int) -> None:
    """Takes the progress of small files and does nothing."""


def _describe(name: HubName, error: Exception) -> str:
    """Returns one line that says what is wrong and what to do about it."""
    match error:
        case HFValidationError():
            return f"{name} is no name on the hub: {_first_line(error)}"
        case GatedRepoError():
            return (
                f"{name} is gated: accept its terms at {constants.ENDPOINT}/{name.repository} and "
                "set HF_TOKEN to a token of that account"
            )
        case RepositoryNotFoundError():
            return (
                f"{name} is neither a folder here nor a model on the hub that may be read; a "
                "private one needs HF_TOKEN"
            )
        case RevisionNotFoundError():
            return f"{name.repository} has no revision {name.revision or 'main'} on the hub"
        case LocalEntryNotFoundError() | OfflineModeIsEnabled():
            config = huggingface_hub.try_to_load_from_cache(
                name.repository, CONFIG_FILE, revision=name.revision
            )
            cached = "only a part of it" if isinstance(config, str) else "no copy"
            cause = error.__cause__
            if constants.HF_HUB_OFFLINE:
                why = "HF_HUB_OFFLINE is set"
            else:
                why = f"the hub at {constants.ENDPOINT} does not answer"
                why += f" ({_first_line(cause)})" if cause is not None else ""
            return (
                f"{name} is no folder here and cannot be fetched: {why}, and the cache has {cached}"
            )
        case HfHubHTTPError():
            return f"{name} cannot be fetched from {constants.ENDPOINT}: {_first_line(error)}"
        case httpx2.HTTPError():
            return (
                f"{name} cannot be fetched: the hub at {constants.ENDPOINT} does not answer "
                f"({_first_line(error)}); the next start goes on where this one stopped"
            )
        case OSError(strerror=str(reason)):
            return f"{name} cannot be kept in {constants.HF_HUB_CACHE}: {reason}"
        case _:
            return f"{name} cannot be fetched: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
