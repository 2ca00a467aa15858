"""Brings large files of a model into the hub's cache, and goes on where an earlier try stopped.

huggingface_hub begins a file again after its process has ended, with all files at the same time.
"""

import hashlib
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from os import SEEK_END
from pathlib import Path
from typing import Any

import huggingface_hub
from filelock import FileLock
from huggingface_hub import constants
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # it is exported

from services.hub.names import HubError, HubName
from services.hub.progress import Report, bar_class

NUM_CONNECTIONS = 4
"""Files that arrive at the same time."""

_SHA256 = re.compile(r"[0-9a-f]{64}")
_ETAG = re.compile(r"[\w-]+")


@dataclass(frozen=True, slots=True)
class _File:
    """A file that is to be fetched; etag: names its content, with its SHA-256 if it is large."""

    name: str
    url: str
    etag: str
    num_bytes: int


def fetch_files(name: HubName, folder: Path, files: Sequence[str], report: Report) -> None:
    """Brings files of one commit that the cache lacks.

    Args:
        name: of the model.
        folder: the commit's, `snapshots/COMMIT` of the model's cache.
        files: their names in it.
        report: takes the progress of all files together.

    Raises:
        HubError: a file arrived damaged.
        Exception: of huggingface_hub and its transport.
    """
    missing = [_look_up(name, folder, file) for file in files if not (folder / file).is_file()]
    bars = bar_class(report, sum(file.num_bytes for file in missing))
    with ThreadPoolExecutor(NUM_CONNECTIONS) as threads:
        for done in [threads.submit(_fetch_blob, name, folder, file, bars) for file in missing]:
            try:
                done.result()
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise
    for file in missing:
        huggingface_hub.hf_hub_download(name.repository, file.name, revision=folder.name)


def _look_up(name: HubName, folder: Path, file: str) -> _File:
    url = huggingface_hub.hf_hub_url(name.repository, file, revision=folder.name)
    facts = huggingface_hub.get_hf_file_metadata(url)
    if facts.size is None or facts.etag is None or not _ETAG.fullmatch(facts.etag):
        raise HubError(f"{name}: the hub does not say how large {file} is, or what is in it")
    return _File(file, url, facts.etag, facts.size)


def _fetch_blob(name: HubName, folder: Path, file: _File, bars: Any) -> None:
    blobs = folder.parents[1] / "blobs"
    blob, part = blobs / file.etag, blobs / f"{file.etag}.octavo-part"
    blobs.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{part}.lock"):
        # The library brings larger ones in another way.
        if not blob.exists() and file.num_bytes <= constants.MAX_HTTP_DOWNLOAD_SIZE:
            part.touch()
            with part.open("r+b") as content:
                num_bytes = content.seek(0, SEEK_END)
                if num_bytes > file.num_bytes:
                    num_bytes = content.truncate(content.seek(0))
                http_get(
                    file.url,
                    content,
                    resume_size=num_bytes,
                    headers=build_hf_headers(),
                    expected_size=file.num_bytes,
                    tqdm_class=bars,
                )
            if _is_damaged(part, file.etag):
                part.unlink()
                raise HubError(
                    f"{name}: {file.name} arrived damaged; the next try fetches it again"
                )
            part.replace(blob)
    Path(f"{part}.lock").unlink(missing_ok=True)


def _is_damaged(part: Path, etag: str) -> bool:
    if not _SHA256.fullmatch(etag):  # small files have git's hash, which names type and size too
        return False
    with part.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest() != etag
