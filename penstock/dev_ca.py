"""A certificate authority for development and tests: one CA, certificates for services and for clients.

Keys are ECDSA P-256; the fields follow RFC 5280. The CA's key lies beside the certificates, unencrypted: a real fleet
uses the PKI it has.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

CA_DAYS = 3650
"""Of the CA, which every later call uses again; what it signs has days of its own (90 by default)."""
BACKDATE = dt.timedelta(minutes=5)
"""Certificates begin this much earlier than they are made: clocks differ."""

PRIVATE, PUBLIC = 0o600, 0o644


@dataclass(frozen=True)
class Authority:
    """A CA's certificate and key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def open(cls, directory: Path) -> Authority:
        """Return the CA in `directory`, made if there is none. Raises OSError or ValueError."""
        cert_path, key_path = directory / "ca.pem", directory / "ca-key.pem"
        if cert_path.exists() or key_path.exists():
            key = serialization.load_pem_private_key(key_path.read_bytes(), None)
            if not isinstance(key, ec.EllipticCurvePrivateKey):
                raise ValueError(f"{key_path} is not an elliptic curve key")
            return cls(x509.load_pem_x509_certificate(cert_path.read_bytes()), key)
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Penstock development CA")])
        authority = cls(_signed(name, key, name, key, CA_DAYS, None), key)
        directory.mkdir(parents=True, exist_ok=True)
        write(key_path, _key_pem(key), PRIVATE)
        write(cert_path, authority.certificate.public_bytes(serialization.Encoding.PEM), PUBLIC)
        return authority

    def issue(self, directory: Path, name: str, days: float, hosts: Sequence[str] | None) -> tuple[Path, Path]:
        """Write NAME.pem and NAME-key.pem and return their paths; a client's certificate if `hosts` is None.

        Files that exist are replaced, the key first: a reader in between finds that they do not fit and keeps the old.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = _signed(
            subject, key, self.certificate.subject, self.key, days, () if hosts is None else tuple(hosts)
        )
        cert_path, key_path = directory / f"{name}.pem", directory / f"{name}-key.pem"
        write(key_path, _key_pem(key), PRIVATE)
        write(cert_path, certificate.public_bytes(serialization.Encoding.PEM), PUBLIC)
        return cert_path, key_path


def _signed(
    subject: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Name,
    issuer_key: ec.EllipticCurvePrivateKey,
    days: float,
    hosts: Sequence[str] | None,
) -> x509.Certificate:
    """Return a certificate: a CA's if `hosts` is None, a client's if it is empty, else a service's."""
    now = dt.datetime.now(dt.UTC)
    is_ca = hosts is None
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATE)
        .not_valid_after(max(now + dt.timedelta(days=days), now - BACKDATE + dt.timedelta(seconds=1)))
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        .add_extension(_key_usage(is_ca), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
    )
    if not is_ca:
        uses = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if hosts:
            # Services connect to each other: theirs is both.
            uses.append(ExtendedKeyUsageOID.SERVER_AUTH)
            builder = builder.add_extension(
                x509.SubjectAlternativeName([_general_name(host) for host in hosts]), critical=False
            )
        builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
    return builder.sign(issuer_key, hashes.SHA256())


def _key_usage(is_ca: bool) -> x509.KeyUsage:
    """Return what a key is for; Python 3.13 trusts no CA that does not say it."""
    return x509.KeyUsage(
        digital_signature=not is_ca,
        key_cert_sign=is_ca,
        crl_sign=is_ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def write(path: Path, content: bytes, mode: int) -> None:
    """Put a file in place at once: readers see the old one or the new one."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(name, mode)
        os.replace(name, path)
    except OSError:
        os.unlink(name)
        raise
