"""Certificates are read when they make sense, and kept when they do not."""

import os
import ssl

import grpc
import pytest
import structlog

from services.transport.tls import ClientTls, ServerTls, TlsFilesError, open_channel
from tests.support.certificates import LOOPBACK, Authority


def server_of(authority: Authority) -> ServerTls:
    pair = authority.issue("server", LOOPBACK)
    return ServerTls(cert=pair.cert, key=pair.key, client_ca=authority.cert)


def test_without_flags_there_is_no_tls():
    assert ServerTls.from_settings(cert=None, key=None, client_ca=None) is None
    assert ClientTls.from_settings(ca=None, cert=None, key=None, prefix="--tls") is None


def test_a_new_context_is_made_once_for_each_change(tmp_path):
    authority = Authority(tmp_path)
    tls = server_of(authority)
    first = tls.current_context()
    assert tls.current_context() is first
    authority.issue("server", LOOPBACK)
    second = tls.current_context()
    assert second is not first
    assert tls.current_context() is second
    assert second.verify_mode == ssl.CERT_REQUIRED


@pytest.mark.parametrize("fault", ["gone", "garbage", "another key", "fifo", "device"])
def test_files_that_make_no_sense_leave_the_last_good_ones_with_one_warning(tmp_path, fault):
    authority = Authority(tmp_path)
    tls = server_of(authority)
    good = tls.current_context()
    key = tmp_path / "server.key"
    if fault == "gone":
        key.unlink()
    elif fault == "fifo":
        key.unlink()
        os.mkfifo(key)
    elif fault == "device":
        key.unlink()
        key.symlink_to("/dev/zero")
    elif fault == "garbage":
        key.write_text("garbage")
    else:
        # A file of its own: one that is written over may keep its size and its time.
        authority.issue("other", LOOPBACK).key.replace(key)
    with structlog.testing.capture_logs() as lines:
        assert tls.current_context() is good
        assert tls.current_context() is good
    assert {line["event"] for line in lines} == {"certificates_not_reloaded"}
    key.unlink(missing_ok=True)
    authority.issue("server", LOOPBACK)
    assert tls.current_context() is not good


def test_a_private_key_that_others_may_read_is_warned_about_once_for_each_reading(tmp_path):
    pair = Authority(tmp_path).issue("server", LOOPBACK)
    pair.key.chmod(0o644)
    with structlog.testing.capture_logs() as lines:
        tls = ServerTls(cert=pair.cert, key=pair.key, client_ca=None)
        tls.current_context()
        client = ClientTls(ca=pair.cert, cert=pair.cert, key=pair.key)
        client.credentials()
    assert [(line["event"], line["path"]) for line in lines] == [
        ("secret_file_exposed", str(pair.key))
    ] * 2


def test_a_key_with_a_passphrase_is_refused_instead_of_asked_for(tmp_path):
    from cryptography.hazmat.primitives import serialization

    pair = Authority(tmp_path).issue("server", LOOPBACK)
    key = serialization.load_pem_private_key(pair.key.read_bytes(), None)
    locked = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    pair.key.write_bytes(locked)
    with pytest.raises(TlsFilesError, match="passphrase"):
        ServerTls(cert=pair.cert, key=pair.key, client_ca=None)


def test_a_client_reads_its_files_each_time_it_connects(tmp_path):
    authority = Authority(tmp_path)
    pair = authority.issue("client", LOOPBACK)
    tls = ClientTls(ca=authority.cert, cert=pair.cert, key=pair.key)
    pair.cert.unlink()
    with pytest.raises(TlsFilesError, match=r"client\.pem cannot be read"):
        tls.credentials()
    authority.cert.write_text("no certificate")
    with pytest.raises(TlsFilesError, match="holds no certificates"):
        ClientTls(ca=authority.cert, cert=None, key=None)


@pytest.mark.parametrize("variable", ["http_proxy", "https_proxy", "grpc_proxy"])
async def test_a_proxy_of_the_environment_is_not_used_between_services(monkeypatch, variable):
    monkeypatch.setenv(variable, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy")
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with open_channel(f"127.0.0.1:{port}", [], None) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await channel.unary_unary("/any/Method")(b"")
        assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED  # the server's own answer
    finally:
        await server.stop(None)
