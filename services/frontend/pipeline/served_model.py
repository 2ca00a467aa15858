"""The served model's tokenizer and chat template."""

import asyncio
from dataclasses import dataclass

import structlog

from services.frontend.engine_client.messages import ModelInfo
from services.frontend.engine_client.tokenizer_files import TokenizerFiles
from services.frontend.reply.reply_format import AUTO, ReplyFormat
from services.frontend.text.template_process import TemplateProcess
from services.frontend.text.template_source import (
    TemplateRefusedError,
    TemplateSource,
    find_template,
)
from services.frontend.text.tokenizer import Tokenizer, TokenizerFilesError

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A served model with its tokenizer and chat template."""

    info: ModelInfo
    tokenizer: Tokenizer
    template: TemplateProcess | None
    reply_format: ReplyFormat | None = None
    """The format of replies; None without a chat template."""
    template_error: str = ""
    """Why the chat template cannot be used; empty if it can or there is none."""

    @classmethod
    async def load(
        cls,
        info: ModelInfo,
        files: TokenizerFiles,
        *,
        template_timeout_s: float,
        reply_format: str = AUTO,
    ) -> "ServedModel":
        """Loads a model's tokenizer and starts its chat template.

        `reply_format` is AUTO or a name of FORMATS.

        Raises:
            TokenizerFilesError: the tokenizer cannot be used.
        """
        tokenizer = await asyncio.to_thread(Tokenizer, files, vocab_size=info.vocab_size)
        try:
            source = find_template(files, special_tokens=tokenizer.special_tokens)
        except TokenizerFilesError as error:
            log.warning("chat_template_refused", reason=str(error))
            return cls(info, tokenizer, None, template_error=str(error))
        if source is None:
            return cls(info, tokenizer, None)
        template, template_error = await _start_template(source, template_timeout_s)
        form = ReplyFormat.find(source, tokenizer, name=reply_format)
        return cls(info, tokenizer, template, form, template_error)

    def has_same_text(self, other: ModelInfo) -> bool:
        """Whether the tokenizer and template fit another model too."""
        own = self.info
        return (own.tokenizer_sha256, own.vocab_size) == (other.tokenizer_sha256, other.vocab_size)

    async def close(self) -> None:
        """Ends the chat template's process."""
        if self.template is not None:
            await self.template.close()


async def _start_template(
    source: TemplateSource, timeout_s: float
) -> tuple[TemplateProcess | None, str]:
    """Returns the chat template, or why it cannot be used."""
    template = TemplateProcess(source, timeout_s=timeout_s)
    try:
        await template.start()
    except TemplateRefusedError as error:
        log.warning("chat_template_refused", reason=str(error))
        return None, str(error)
    except TokenizerFilesError as error:  # the next chat retries
        log.warning("template_process_not_started", reason=str(error))
    return template, ""
