"""Credentials of a client, the errors where they are missing, and its way to this machine."""

from pathlib import Path

import grpc
import pytest

from services.client.channel import Access, Tls, open_channel
from tests.support.certificates import LOOPBACK, Authority


def test_without_files_there_are_neither_credentials_nor_metadata():
    assert Tls().credentials is None
    assert Access().metadata == ()


def test_certificates_become_credentials(tmp_path):
    authority = Authority(tmp_path)
    pair = authority.issue("client", LOOPBACK)
    assert Tls(tls_ca=authority.cert).credentials is not None
    assert Tls(tls_ca=authority.cert, tls_cert=pair.cert, tls_key=pair.key).credentials is not None


def test_files_that_are_missing_or_lack_another_are_named(tmp_path):
    here = tmp_path / "here"
    here.write_text("x")
    with pytest.raises(ValueError, match="no file nowhere"):
        Tls(tls_ca=Path("nowhere"))
    with pytest.raises(ValueError, match="come together"):
        Tls(tls_ca=here, tls_cert=here)
    with pytest.raises(ValueError, match="needs --tls-ca"):
        Tls(tls_cert=here, tls_key=here)


def test_a_key_comes_from_its_file_without_the_line_break_and_is_not_shown(tmp_path):
    file = tmp_path / "key"
    file.write_text("octavo-secret-key\n")
    access = Access(api_key_file=file)
    assert access.metadata == (("authorization", "Bearer octavo-secret-key"),)
    assert "octavo-secret-key" not in repr(access)


@pytest.mark.parametrize("content", [b"", b"\n", b"two\nlines", b"\xff", "schl\u00fcssel".encode()])
def test_a_file_without_a_key_is_named(tmp_path, content):
    file = tmp_path / "key"
    file.write_bytes(content)
    with pytest.raises(ValueError, match="key"):
        Access(api_key_file=file)
    with pytest.raises(ValueError, match="cannot be read"):
        Access(api_key_file=tmp_path / "nowhere")
    with pytest.raises(ValueError, match="two keys"):
        Access(api_key_file=file, api_key="x")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize("variable", ["http_proxy", "https_proxy", "grpc_proxy"])
async def test_a_proxy_of_the_environment_is_not_used_for_this_machine(monkeypatch, variable, host):
    monkeypatch.setenv(variable, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy")
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with open_channel(f"{host}:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await channel.unary_unary("/any/Method")(b"")
        assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED  # the server's own answer
    finally:
        await server.stop(None)
