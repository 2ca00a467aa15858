"""Low-rank adapters in planning code, without tensors or protobuf."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """An adapter in the worker's host memory, which requests may name.

    digest: SHA-256 of its files, by which the worker knows it. rank: its largest. num_bytes: host
    memory of the first rank's share.
    """

    name: str
    path: str
    digest: bytes
    rank: int
    num_bytes: int
