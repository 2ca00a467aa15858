"""The tokenizer files in one archive."""

import hashlib
import io
import zipfile
from collections.abc import Iterator

from smg_grpc_proto.generated.common_pb2 import GetTokenizerChunk

from services.engine.checkpoint.tokenizer_files import TokenizerFiles

CHUNK_BYTES = 2**16


class TokenizerArchive:
    """A ZIP without compression, built once in memory and always the same."""

    def __init__(self, tokenizer: TokenizerFiles) -> None:
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w", zipfile.ZIP_STORED) as archive:
            for file in tokenizer.files:
                archive.writestr(zipfile.ZipInfo(file.name), file.content)
        self._content = content.getvalue()
        self._sha256 = hashlib.sha256(self._content).hexdigest()

    def chunks(self) -> Iterator[GetTokenizerChunk]:
        """Yields the archive in order; the last chunk has the hash of the whole."""
        for start in range(0, len(self._content), CHUNK_BYTES):
            part = self._content[start : start + CHUNK_BYTES]
            is_last = start + len(part) == len(self._content)
            yield GetTokenizerChunk(data=part, sha256=self._sha256 if is_last else "")
