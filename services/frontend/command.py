"""Reads the frontend's command line, and checks the files that it names."""

from collections.abc import Sequence
from inspect import cleandoc

from pydantic import ValidationError
from pydantic_settings import CliApp, SettingsError

from services.frontend.access.key_file import KeyFileError, read_key_file
from services.frontend.config import FrontendConfig
from services.frontend.images.media.urls import MediaHost
from services.settings.flags import CLI_PREFIX, UsageError, reason_of
from services.transport.tls import ClientTls, ServerTls, TlsFilesError


def read_config(arguments: Sequence[str]) -> FrontendConfig:
    """Returns the configuration from arguments and environment variables.

    Raises:
        UsageError: one is no flag, a value is out of bounds, or the tokenizer's folder has none.
        SystemExit: an argument requests help.
    """
    # Python 3.13 removes the docstring's indentation; help shows the docstring unchanged.
    FrontendConfig.__doc__ = cleandoc(FrontendConfig.__doc__ or "")
    try:
        config = CliApp.run(FrontendConfig, cli_args=list(arguments))
    except ValidationError as error:
        raise UsageError("\n".join(_problems(error))) from error
    except SettingsError as error:
        raise UsageError(str(error).removeprefix(CLI_PREFIX)) from error
    if config.tokenizer is not None and not (config.tokenizer / "tokenizer.json").is_file():
        raise UsageError(f"--tokenizer: no tokenizer.json in {config.tokenizer}")
    try:
        for host in config.media_host_names:
            MediaHost.parse(host)
    except ValueError as error:
        raise UsageError(f"--media-hosts: {error}") from None
    return config


def check_files(config: FrontendConfig) -> None:
    """Checks the certificates and the API keys that a frontend reads when it starts.

    Raises:
        UsageError: a file cannot be used.
    """
    try:
        ServerTls.from_settings(
            cert=config.tls_cert, key=config.tls_key, client_ca=config.tls_client_ca
        )
        ClientTls.from_settings(
            ca=config.engine_tls_ca,
            cert=config.engine_tls_cert,
            key=config.engine_tls_key,
            prefix="--engine-tls",
        )
        if config.api_keys_file is not None:
            read_key_file(config.api_keys_file)
    except (TlsFilesError, KeyFileError, OSError) as error:
        raise UsageError(str(error)) from error


def _problems(error: ValidationError) -> list[str]:
    """Returns a line for each problem of a configuration, with its flag where it has one."""
    lines = []
    for problem in error.errors():
        flags = (str(name).replace("_", "-") for name in problem["loc"][:1])
        place = "".join(f"--{flag} is {problem['input']!r}: " for flag in flags)
        lines.append(place + reason_of(problem))
    return lines
