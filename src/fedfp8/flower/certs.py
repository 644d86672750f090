"""Certificates and keys for a deployment: a CA, the SuperLink's certificate, and one key pair a SuperNode.

For tests and small federations of your own. Where an organisation has a CA, use it: Flower needs the same files.
"""

import datetime
import ipaddress
import os
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedfp8.errors import ConfigError

__all__ = ["make_certs"]

DAYS = 365
LOOPBACK = ("127.0.0.1", "::1", "localhost")
PRIVATE = serialization.PrivateFormat


def make_certs(folder: Path, hosts: list[str], nodes: int, *, overwrite: bool = False) -> dict[str, Path]:
    """Write ca.crt, ca.key, server.pem, server.key, node-0, node-0.pub, ... into `folder`; returns their paths by name.

    hosts: names and addresses under which nodes reach the SuperLink (the certificate's SAN); those of this machine are
    added, since the SuperLink's own processes use them. Private keys are readable by their owner only.
    """
    if not hosts or nodes < 1:
        raise ConfigError(f"{len(hosts)} hosts and {nodes} nodes were given; at least one of each is needed")
    hosts = list(dict.fromkeys([*hosts, *LOOPBACK]))
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "ca.key").exists() and not overwrite:
        raise ConfigError(
            f"{folder} holds certificates already; choose another folder, or replace them with --overwrite"
        )
    ca_key, server_key = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    ca_name = _name("fedfp8 CA")
    ca = _certificate(ca_name, ca_key.public_key(), ca_name, ca_key, authority=True, hosts=[])
    server = _certificate(_name(hosts[0]), server_key.public_key(), ca_name, ca_key, authority=False, hosts=hosts)
    pem = serialization.Encoding.PEM
    files = {
        "ca.crt": ca.public_bytes(pem),
        "ca.key": _private(ca_key, PRIVATE.PKCS8),
        "server.pem": server.public_bytes(pem),
        "server.key": _private(server_key, PRIVATE.PKCS8),
    }
    for number in range(nodes):
        key = ec.generate_private_key(ec.SECP384R1())
        files[f"node-{number}"] = _private(key, PRIVATE.OpenSSH)
        public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        files[f"node-{number}.pub"] = public + b"\n"
    for name, data in files.items():
        _write(folder / name, data, secret=not name.endswith((".crt", ".pem", ".pub")))
    return {name: folder / name for name in files}


def _write(path: Path, data: bytes, *, secret: bool) -> None:
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644), "wb") as file:
        file.write(data)


def _private(key: ec.EllipticCurvePrivateKey, format: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, format, serialization.NoEncryption())


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _certificate(
    subject: x509.Name,
    key: ec.EllipticCurvePublicKey,
    issuer: x509.Name,
    issuer_key: ec.EllipticCurvePrivateKey,
    *,
    authority: bool,
    hosts: list[str],
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=DAYS))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=0 if authority else None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
        .add_extension(_usage(authority), critical=True)
    )
    if hosts:
        builder = builder.add_extension(x509.SubjectAlternativeName([_alternative(h) for h in hosts]), critical=False)
        server_auth = x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH])
        builder = builder.add_extension(server_auth, critical=False)
    return builder.sign(issuer_key, hashes.SHA256())


def _usage(authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority, key_cert_sign=authority, crl_sign=authority, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
