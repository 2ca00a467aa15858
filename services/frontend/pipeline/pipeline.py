"""Runs requests: checks them, encodes prompts, and submits them to the engines."""

import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Protocol

from services.frontend.access.caller import Lease
from services.frontend.access.gate import Gate
from services.frontend.engine_client.pool import EnginePool
from services.frontend.errors import FrontendError
from services.frontend.pipeline.bad_words import with_forbidden_words
from services.frontend.pipeline.generation import Generation
from services.frontend.pipeline.image_reading import ImageParts
from services.frontend.pipeline.prompt_images import PromptImages
from services.frontend.pipeline.prompts import TEMPLATE_GROWTH, Prompts
from services.frontend.pipeline.request import (
    Conversation,
    Options,
    Output,
    Prompt,
    check_options,
    prompts_of,
)
from services.frontend.pipeline.request_log import RequestLog, RequestRecord
from services.frontend.pipeline.samples import Samples, wait_until_admitted
from services.frontend.pipeline.served_model import ServedModel
from services.frontend.pipeline.served_models import ServedModels
from services.frontend.pipeline.submission import Submission
from services.frontend.pipeline.vectors import VectorRequests
from services.frontend.reply.reply_format import ReplySettings

if TYPE_CHECKING:
    from services.telemetry.spans import Tracing

_AS_THE_MODEL = ReplySettings()
_NO_IMAGES = ImageParts()


class Outlet(Protocol):
    """The destination of one request's output."""

    async def begin(self, generation: Generation | Samples) -> None:
        """Starts after the engine has admitted the request."""

    async def write(self, output: Output) -> None:
        """Writes new output."""


class Pipeline:
    """Runs requests for the models that the engines serve."""

    def __init__(  # noqa: PLR0913  the parts of a pipeline
        self,
        engine: EnginePool,
        *,
        max_prompt_bytes: int,
        max_samples: int = 32,
        num_tokenizer_threads: int = 2,
        template_timeout_s: float = 2.0,
        replies: ReplySettings = _AS_THE_MODEL,
        images: ImageParts = _NO_IMAGES,
        gate: Gate | None = None,
        tracing: "Tracing | None" = None,
    ) -> None:
        """Serves nothing before `models` has one."""
        self.engine = engine
        self.requests = RequestLog(tracing)
        """Records every request."""
        self.gate = gate or Gate()
        """Checks what callers may do."""
        self._max_samples = max_samples
        self._replies = replies
        self._prompts = Prompts(
            PromptImages(
                images.limits,
                images.fetcher,
                counts=self.gate.counts,
                figures=self.requests.counts.images,
            ),
            max_prompt_bytes=max_prompt_bytes,
            num_tokenizer_threads=num_tokenizer_threads,
            counts=self.gate.counts,
        )
        load = partial(
            ServedModel.load,
            template_timeout_s=template_timeout_s,
            replies=replies,
            max_text_bytes=TEMPLATE_GROWTH * max_prompt_bytes,
            num_processes=max(1, num_tokenizer_threads // 2),
            open_reader=images.open_reader,
        )
        self.models = ServedModels(engine, self.gate, load)
        """The served models."""
        self.vectors = VectorRequests(engine, self._prompts, self.models.named)
        """Runs requests for vectors and scores."""

    def begin(self, request_id: str, address: str, *, method: str, is_free: bool = False) -> Lease:
        """Takes the acting caller's slot for a request; a refusal is recorded as a failed one.

        Args:
            request_id: the request's id.
            address: where the caller is.
            method: the request's method in the log.
            is_free: whether it costs no tokens, so that a caller in debt may make it.

        Raises:
            FrontendError: the caller is at a limit, or its key was removed.
        """
        try:
            return self.gate.begin(address, is_free=is_free)
        except FrontendError:
            with self.requests.watch(request_id, method=method):
                raise

    async def serve(
        self,
        prompt: Prompt,
        options: Options,
        outlet: Outlet,
        *,
        record: RequestRecord,
        lease: Lease,
        timeout_s: float | None = None,
    ) -> None:
        """Runs a request from its prompt to its last output; see `start`."""
        generation = await self.start(
            prompt, options, record=record, timeout_s=timeout_s, lease=lease
        )
        with closing(generation):
            await outlet.begin(generation)
            async for output in generation:
                record.observe(output)
                await outlet.write(output)

    async def start(
        self,
        prompt: Prompt,
        options: Options,
        *,
        record: RequestRecord,
        lease: Lease,
        timeout_s: float | None = None,
    ) -> Generation | Samples:
        """Submits a request and returns its output once an engine has admitted it.

        Args:
            prompt: the prompt.
            options: the caller's options.
            record: notes the request's progress.
            lease: the caller's; see `begin`.
            timeout_s: time limit; None for none.

        Raises:
            FrontendError, EngineFaultError: the request is refused or failed.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        model = self.models.named(options.model)
        num_prompts = len(prompts_of(prompt))
        check_options(options, max_samples=self._max_samples, num_prompts=num_prompts)
        try:
            lease.caller.check_priority(options.priority)
            return await self._submit(
                model, prompt, options, deadline_s=deadline_s, lease=lease, record=record
            )
        except BaseException:
            lease.cancel()
            raise

    async def _submit(
        self,
        model: ServedModel,
        prompt: Prompt,
        options: Options,
        *,
        deadline_s: float | None,
        lease: Lease,
        record: RequestRecord,
    ) -> Generation | Samples:
        self.requests.recent.add(lease.caller.engine_request_id(options.request_id), record.story)
        prompts = prompts_of(prompt)
        # All prompts are checked before the engine gets one.
        encoded = await self._prompts.tokens(model, prompts, options, lease)
        record.note_tokenized()
        options = await with_forbidden_words(options, model)
        lease.charge_prompt(sum(len(each.token_ids) for each in encoded))
        submission = Submission(
            engine=self.engine,
            model=model,
            options=options,
            replies=self._replies,
            lease=lease,
            deadline_s=deadline_s,
            traceparent=record.traceparent,
        )
        generations: list[Generation] = []
        try:
            for single, prompt_tokens in zip(prompts, encoded, strict=True):
                new_sample = submission.sampler(single, prompt_tokens)
                for index in range(options.num_samples):
                    generations.append(new_sample(len(generations), index))
                    record.story.routes.append(generations[-1].route)
            await wait_until_admitted(generations)
        except BaseException:  # the caller may be gone
            for generation in generations:
                generation.close()
            raise
        record.note_admitted()
        if len(generations) == 1:
            return generations[0]
        return Samples(generations, samples_per_prompt=options.num_samples)

    async def tokenize(
        self,
        model_name: str,
        prompt: str | Conversation,
        lease: Lease,
        *,
        parse_special_tokens: bool | None = None,
        add_special_tokens: bool | None = None,
    ) -> list[int]:
        """Returns the token ids of a prompt as the engine gets them.

        `add_special_tokens` overrides whether the tokenizer adds its own; None means text alone.

        Raises:
            FrontendError: the model is not served, or the prompt is refused.
        """
        return await self._prompts.encode(
            self.models.named(model_name),
            prompt,
            lease,
            parse_special_tokens=parse_special_tokens,
            add_special_tokens=add_special_tokens,
        )

    async def detokenize(
        self, model_name: str, token_ids: Sequence[int], account: str, *, show_special_tokens: bool
    ) -> str:
        """Returns the text of token ids.

        Raises:
            FrontendError: the model is not served, there are too many ids, or an id is not in the
                vocabulary.
        """
        return await self._prompts.decode(
            self.models.named(model_name),
            token_ids,
            account,
            show_special_tokens=show_special_tokens,
        )

    async def close(self) -> None:
        """Stops the tokenizer's threads and the templates' processes."""
        self._prompts.close()
        await self.models.close()
