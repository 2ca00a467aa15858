"""The secret that an engine's hosts prove to each other when a node joins.

Each side sends a random nonce, and then a keyed hash of both nonces. So the secret itself never
travels, and a hash that was overheard proves nothing in another connection.
"""

import hashlib
import hmac
import secrets
from pathlib import Path
from typing import Self

import structlog

from services.settings.regular_file import describe_exposure, read_regular_file

log = structlog.get_logger()

NONCE_BYTES = 32
MIN_SECRET_BYTES = 16
MAX_SECRET_BYTES = 4096


class NodeSecretError(ValueError):
    """The secret's file cannot be used."""


class NodeSecret:
    """A secret, or the absence of one."""

    def __init__(self, secret: bytes = b"") -> None:
        """Takes the secret; empty stands for none."""
        self._secret = secret

    @classmethod
    def from_file(cls, path: Path | None) -> Self:
        """Reads the secret; white space around it does not count. None stands for no secret.

        Raises:
            NodeSecretError: the file cannot be read, or holds too little.
        """
        if path is None:
            return cls()
        try:
            content = read_regular_file(path, max_bytes=MAX_SECRET_BYTES).strip()
        except OSError as error:
            raise NodeSecretError(
                f"the secret in {path} cannot be read: {error.strerror}"
            ) from None
        if len(content) < MIN_SECRET_BYTES:
            raise NodeSecretError(
                f"the secret in {path} has {len(content)} bytes; {MIN_SECRET_BYTES} are the least"
            )
        if exposure := describe_exposure(path):
            log.warning("secret_file_exposed", path=str(path), reason=exposure)
        return cls(content)

    def __bool__(self) -> bool:
        """Whether there is one."""
        return bool(self._secret)

    def prove(self, side: str, own_nonce: bytes, other_nonce: bytes) -> bytes:
        """Returns a proof that this side knows the secret; empty without one.

        Args:
            side: "head" or "node", so that neither can repeat the other's proof.
            own_nonce: of the side that proves.
            other_nonce: of the side that checks.
        """
        if not self._secret:
            return b""
        words = b"octavo " + side.encode()
        return hmac.digest(self._secret, words + own_nonce + other_nonce, hashlib.sha256)

    def accepts(self, proof: bytes, side: str, its_nonce: bytes, own_nonce: bytes) -> bool:
        """Whether the other side knows the secret; always where there is none.

        Args:
            proof: the other side's.
            side: "head" or "node": the one that has proved.
            its_nonce: of the side that has proved.
            own_nonce: of this side.
        """
        return hmac.compare_digest(proof, self.prove(side, its_nonce, own_nonce)) or not self


def make_nonce() -> bytes:
    """Returns new random bytes for one connection."""
    return secrets.token_bytes(NONCE_BYTES)
