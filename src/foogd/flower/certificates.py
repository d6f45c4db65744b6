"""Certificates and node keys for trials: one authority, one server, one key a node. In earnest use your own."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from ..core.errors import InputError
from .names import NAME, NAME_RULE

DAYS = 365
LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
HOST = re.compile(rf"(\*\.)?{LABEL}(\.{LABEL})*")
LONGEST_COMMON_NAME = 64  # what X.509 allows; browsers and Flower read the alternative names


def write_certificates(folder: Path, hosts: Sequence[str]) -> None:
    """`ca.crt` for everyone, `server.crt` and `server.key` for the server, `ca.key` for a safe place."""
    _refuse_to_overwrite([folder / name for name in ("ca.key", "ca.crt", "server.key", "server.crt")])
    names = [_name(host) for host in hosts]
    authority, server = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "foogd trial authority")])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0][:LONGEST_COMMON_NAME])])
    now = datetime.now(UTC)

    def blank(name: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(issuer)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(minutes=5))
            .not_valid_after(now + timedelta(days=DAYS))
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
        )

    usage = x509.KeyUsage(
        digital_signature=True, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    root = (
        blank(issuer, authority.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(authority, hashes.SHA384())
    )
    leaf = (
        blank(subject, server.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(authority, hashes.SHA384())
    )
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    for name, key in (("ca.key", authority), ("server.key", server)):
        _write_secret(folder / name, key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    for name, certificate in (("ca.crt", root), ("server.crt", leaf)):
        (folder / name).write_bytes(certificate.public_bytes(pem))


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not HOST.fullmatch(host) or len(host) > 253:
            wanted = "an address, or a name as in fl.example.org"
            raise InputError(f"--host {host!r} is not allowed: it must be {wanted}") from None
        return x509.DNSName(host)


def write_keys(folder: Path, names: Sequence[str]) -> list[Path]:
    """For each name a key that stays on its node, and NAME.pub for `foogd flower register`."""
    for name in names:
        if not NAME.fullmatch(name) or name.endswith(".pub"):
            raise InputError(f"the name {name!r} is not allowed: {NAME_RULE}, and .pub may not be its end")
        if names.count(name) > 1:
            raise InputError(f"the name {name!r} was given twice: each node needs a key of its own")
    _refuse_to_overwrite([folder / f"{name}{end}" for name in names for end in ("", ".pub")])
    for name in names:
        key = ec.generate_private_key(ec.SECP384R1())
        pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
        _write_secret(folder / name, key.private_bytes(pem, serialization.PrivateFormat.OpenSSH, plain))
        public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        (folder / f"{name}.pub").write_bytes(public + f" {name}\n".encode())
    return [folder / f"{name}.pub" for name in names]


def _refuse_to_overwrite(paths: Sequence[Path]) -> None:
    found = [path for path in paths if path.exists()]
    if found:
        raise InputError(f"{found[0]} exists already: choose another folder, or remove it")


def _write_secret(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    path.write_bytes(data)
