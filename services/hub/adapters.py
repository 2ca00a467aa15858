"""Brings an adapter's two files from the hub."""

from pathlib import Path

import httpx2
import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from services.hub.names import HubError, HubName

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""All that is fetched: weights in pickles never are."""


def fetch_adapter(name: HubName, cache: Path | None = None) -> Path:
    """Returns the folder of an adapter, after bringing the files that it lacks. Any thread may.

    Args:
        name: of the adapter.
        cache: where files are kept; None for the hub's common cache.

    Raises:
        HubError: it is absent, gated, or the hub cannot be reached and the cache has no copy.
    """
    try:
        return Path(
            huggingface_hub.snapshot_download(
                name.repository,
                revision=name.revision,
                allow_patterns=list(ADAPTER_FILES),
                cache_dir=cache,
            )
        )
    except (HFValidationError, HfHubHTTPError, httpx2.HTTPError, RuntimeError, OSError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise HubError(f"adapter {name} cannot be fetched: {reason}") from error
