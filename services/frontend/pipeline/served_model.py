"""The served model's tokenizer, chat template and reader of images."""

import asyncio
from dataclasses import dataclass, replace

import structlog

from services.frontend.engine_client.messages import ModelInfo
from services.frontend.engine_client.model_identity import packed_processor
from services.frontend.engine_client.tokenizer_files import TokenizerFiles
from services.frontend.images.reader import ImageReader
from services.frontend.pipeline.image_reading import OpenReader
from services.frontend.reply.reply_format import ReplyFormat, ReplySettings
from services.frontend.text.content_marks import MarkedText
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
    image_reader: ImageReader | None = None
    """Reads images; None if the model sees none, or its images cannot be read here."""
    image_error: str = ""
    """Why images cannot be read here; empty if they can or the model sees none."""
    adapter: str = ""
    """The adapter that a request names as its model; empty for the model itself."""
    adapter_digest: bytes = b""

    @property
    def name(self) -> str:
        """The name that requests use."""
        return self.adapter or self.info.model

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
        open_reader: OpenReader,
    ) -> "ServedModel":
        """Loads a model's tokenizer and starts its chat template.

        Args:
            info: the model.
            files: its tokenizer's files.
            template_timeout_s: time limit of the chat template.
            replies: how replies are read.
            max_text_bytes: longest text that is encoded.
            num_processes: processes that encode long texts.
            open_reader: opens the reader of its images.

        Raises:
            TokenizerFilesError: the tokenizer cannot be used.
        """
        tokenizer = await asyncio.to_thread(
            Tokenizer, files, vocab_size=info.vocab_size, image_token_ids=_image_token_ids(info)
        )
        long_texts = TokenizerProcess(
            tokenizer.content, num_processes=num_processes, max_text_bytes=max_text_bytes
        )
        model = cls(info, tokenizer, None, long_texts)
        model = await model._with_template(files, template_timeout_s, replies)
        return model._with_reader(open_reader)

    def _with_reader(self, open_reader: OpenReader) -> "ServedModel":
        """Returns the model with its reader of images, or why there is none."""
        image_token_ids = _image_token_ids(self.info)
        if not image_token_ids:
            return self
        missing = [each for each in image_token_ids if not self.tokenizer.is_special(each)]
        reason = f"the tokenizer adds no image token {missing[0] if missing else ''}"
        if not missing:
            try:
                return replace(self, image_reader=open_reader(self.info))
            except ValueError as error:
                reason = str(error)
        log.warning("image_processor_refused", reason=reason)
        return replace(self, image_error=f"its images cannot be read here: {reason}")

    async def _with_template(
        self, files: TokenizerFiles, timeout_s: float, replies: ReplySettings
    ) -> "ServedModel":
        """Returns the model with its chat template, which is started, or why there is none."""
        tokenizer = self.tokenizer
        try:
            source = find_template(files, special_tokens=tokenizer.special_tokens)
        except TokenizerFilesError as error:
            log.warning("chat_template_refused", reason=str(error))
            return replace(self, template_error=str(error))
        if source is None:
            return self
        form = ReplyFormat.find(source, tokenizer, name=replies.format_name)
        template = TemplateProcess(
            source,
            timeout_s=timeout_s,
            is_strict=replies.is_strict,
            writes_tools=form.writes_tools,
        )
        template_error = await _start(template)
        return replace(
            self,
            template=None if template_error else template,
            reply_format=form,
            template_error=template_error,
        )

    def with_text_around_images(self, rendered: str) -> MarkedText:
        """Returns what a template process rendered, with the text around each image token."""
        text = MarkedText.read(rendered)
        around = self.info.image_processor.text_around
        if self.image_reader is None or not around:
            return text
        # Callers cannot spell the token: in their text it has marks inside.
        spelled = str(self.tokenizer.library.id_to_token(template_token_id(self.info)))
        return replace(text, text=text.text.replace(spelled, f"{around}{spelled}{around}"))

    def has_same_text(self, other: ModelInfo) -> bool:
        """Whether the tokenizer, template and reader of images fit another model too."""
        return _text_of(self.info) == _text_of(other)

    async def close(self) -> None:
        """Ends the processes of the chat template, of long texts and of images."""
        await self.long_texts.close()
        if self.image_reader is not None:
            await self.image_reader.close()
        if self.template is not None:
            await self.template.close()


def template_token_id(info: ModelInfo) -> int:
    """Returns the token that the chat template of a model writes for an image."""
    processor = info.image_processor
    if processor.HasField("template_token_id"):
        return processor.template_token_id
    return processor.image_token_id


def _image_token_ids(info: ModelInfo) -> tuple[int, ...]:
    if not info.HasField("image_processor"):
        return ()
    return info.image_processor.image_token_id, template_token_id(info)


def _text_of(info: ModelInfo) -> tuple[str, int, bytes]:
    return info.tokenizer_sha256, info.vocab_size, packed_processor(info)


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
