"""The served model's tokenizer and chat template."""

import asyncio
from dataclasses import dataclass

import structlog

from services.frontend.engine_client.messages import ModelInfo
from services.frontend.engine_client.tokenizer_files import TokenizerFiles
from services.frontend.reply.reply_format import ReplyFormat, ReplySettings
from services.frontend.text.template_process import TemplateProcess
from services.frontend.text.template_source import TemplateRefusedError, find_template
from services.frontend.text.tokenizer import Tokenizer, TokenizerFilesError
from services.frontend.text.tokenizer_process import TokenizerProcess

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A served model with its tokenizer and chat template."""

    info: ModelInfo
    tokenizer: Tokenizer
    template: TemplateProcess | None
    long_texts: TokenizerProcess
    """Encodes and decodes long texts with the same tokenizer."""
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
        replies: ReplySettings,
        max_text_bytes: int,
        num_processes: int,
    ) -> "ServedModel":
        """Loads a model's tokenizer and starts its chat template.

        Args:
            info: the model.
            files: its tokenizer's files.
            template_timeout_s: time limit of the chat template.
            replies: how replies are read.
            max_text_bytes: longest text that is encoded.
            num_processes: processes that encode long texts.

        Raises:
            TokenizerFilesError: the tokenizer cannot be used.
        """
        tokenizer = await asyncio.to_thread(Tokenizer, files, vocab_size=info.vocab_size)
        long_texts = TokenizerProcess(
            tokenizer.content, num_processes=num_processes, max_text_bytes=max_text_bytes
        )
        try:
            source = find_template(files, special_tokens=tokenizer.special_tokens)
        except TokenizerFilesError as error:
            log.warning("chat_template_refused", reason=str(error))
            return cls(info, tokenizer, None, long_texts, template_error=str(error))
        if source is None:
            return cls(info, tokenizer, None, long_texts)
        form = ReplyFormat.find(source, tokenizer, name=replies.format_name)
        template = TemplateProcess(
            source,
            timeout_s=template_timeout_s,
            is_strict=replies.is_strict,
            writes_tools=form.writes_tools,
        )
        template_error = await _start(template)
        if template_error:
            return cls(info, tokenizer, None, long_texts, form, template_error)
        return cls(info, tokenizer, template, long_texts, form)

    def has_same_text(self, other: ModelInfo) -> bool:
        """Whether the tokenizer and template fit another model too."""
        own = self.info
        return (own.tokenizer_sha256, own.vocab_size) == (other.tokenizer_sha256, other.vocab_size)

    async def close(self) -> None:
        """Ends the processes of the chat template and of long texts."""
        await self.long_texts.close()
        if self.template is not None:
            await self.template.close()


async def _start(template: TemplateProcess) -> str:
    """Starts a chat template; returns why it cannot be used, if so."""
    try:
        await template.start()
    except TemplateRefusedError as error:
        log.warning("chat_template_refused", reason=str(error))
        return str(error)
    except TokenizerFilesError as error:  # the next chat retries
        log.warning("template_process_not_started", reason=str(error))
    return ""
