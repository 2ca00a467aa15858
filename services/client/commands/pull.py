"""`octavo pull`: brings a model from the hub to this machine."""

from typing import Annotated

import typer

from services.client.console import echo
from services.client.model import pull as pull_model
from services.hub.names import HubName


def pull(
    *,
    name: Annotated[str, typer.Argument(help="The model, as OWNER/NAME or OWNER/NAME@REVISION.")],
    gguf_file: Annotated[
        str, typer.Option(help="The GGUF file to fetch, or its first shard, if there are several.")
    ] = "",
) -> None:
    """Fetches a model from the Hugging Face hub and prints its folder, or its GGUF file.

    Only what an engine reads is fetched: configuration, tokenizer, chat template and safetensors,
    or one model in GGUF.
    Run it again after an interruption: it goes on where it stopped. HF_HOME, HF_TOKEN,
    HF_HUB_OFFLINE and HF_ENDPOINT hold.

    Examples:
    - `octavo pull Qwen/Qwen3-0.6B`

    - `octavo pull Qwen/Qwen3-0.6B@main`
    """
    echo(str(pull_model(HubName.parse(name), gguf_file=gguf_file)))
