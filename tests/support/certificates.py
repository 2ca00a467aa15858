"""Certificates for tests, in files."""

import datetime
from dataclasses import dataclass
from pathlib import Path

import grpc
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID

LOOPBACK = "127.0.0.1"
DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Pair:
    """A certificate and its private key."""

    cert: Path
    key: Path


class Authority:
    """Issues certificates into a folder. Two authorities do not trust each other."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._ca = trustme.CA(organization_name=name)
        self.cert = folder / f"{name}.pem"
        self._ca.cert_pem.write_to_path(str(self.cert))

    def issue(self, file_name: str, *names: str, expired: bool = False) -> Pair:
        """Writes a certificate for `names` to the folder, over an older one of that file name.

        Files appear whole, as they do where they are mounted: each is moved into its place.
        """
        now = datetime.datetime.now(datetime.UTC)
        issued = self._ca.issue_cert(
            *names,
            common_name=names[-1],
            not_before=now - 2 * DAY,
            not_after=now - DAY if expired else now + DAY,
        )
        pair = Pair(self._folder / f"{file_name}.pem", self._folder / f"{file_name}.key")
        chain = b"".join(blob.bytes() for blob in issued.cert_chain_pems)
        _put(pair.key, issued.private_key_pem.bytes())
        _put(pair.cert, chain)
        return pair

    def issue_named(self, common_name: str, *dns_names: str) -> Pair:
        """Writes a certificate with names as they are given, which may be no names of hosts."""
        key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
        subject = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)] if common_name else []
        issuer = x509.load_pem_x509_certificate(self._ca.cert_pem.bytes())
        signer = load_pem_private_key(self._ca.private_key_pem.bytes(), None)
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name(subject))
            .issuer_name(issuer.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - DAY)
            .not_valid_after(now + DAY)
        )
        if dns_names:
            names = x509.SubjectAlternativeName([x509.DNSName(name) for name in dns_names])
            builder = builder.add_extension(names, critical=False)
        pair = Pair(self._folder / "named.pem", self._folder / "named.key")
        cert = builder.sign(signer, hashes.SHA256())  # type: ignore[arg-type]  # an EC key
        _put(pair.cert, cert.public_bytes(Encoding.PEM))
        _put(
            pair.key,
            key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        )
        return pair


def credentials(authority: Authority, pair: Pair | None = None) -> grpc.ChannelCredentials:
    """Credentials of a client that trusts `authority` and shows `pair`."""
    return grpc.ssl_channel_credentials(
        authority.cert.read_bytes(),
        pair.key.read_bytes() if pair else None,
        pair.cert.read_bytes() if pair else None,
    )


def serial_of(pair: Pair) -> int:
    """The serial number of a certificate in a file."""
    return x509.load_pem_x509_certificate(pair.cert.read_bytes()).serial_number


def _put(path: Path, content: bytes) -> None:
    fresh = path.with_suffix(path.suffix + ".new")
    fresh.write_bytes(content)
    fresh.replace(path)
