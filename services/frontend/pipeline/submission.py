"""Submits the outputs of one request to the engines."""

from collections.abc import Callable
from dataclasses import dataclass

from services.frontend.access.caller import Lease
from services.frontend.engine_client.messages import EngineRequest, ModelInfo, pack_uint32
from services.frontend.engine_client.pool import EnginePool
from services.frontend.engine_client.token_stream import TokenStream
from services.frontend.pipeline.generation import Generation
from services.frontend.pipeline.prompt_images import EncodedPrompt
from services.frontend.pipeline.reply_plan import continue_form, plan_reply
from services.frontend.pipeline.request import Conversation, Options
from services.frontend.pipeline.samples import sample_id, sampling_of
from services.frontend.pipeline.served_model import ServedModel
from services.frontend.reply.reply_format import ReplySettings
from services.frontend.reply.reply_text import ReplyText
from services.frontend.text.detokenizer import Detokenizer
from services.frontend.text.output_text import OutputText
from services.frontend.text.stop_strings import StopStrings

PROMPT_TAIL_TOKENS = 256
"""Last prompt tokens searched for an unfinished character."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One request on its way to the engines."""

    engine: EnginePool
    model: ServedModel
    options: Options
    replies: ReplySettings
    lease: Lease
    deadline_s: float | None
    traceparent: str

    def sampler(
        self, prompt: str | list[int] | Conversation, encoded: EncodedPrompt
    ) -> Callable[[int, int], Generation]:
        """Returns a function that submits one sample of a prompt.

        It takes the sample's index among the request's outputs and among those of the prompt.

        Raises:
            InvalidRequestError: the model's format cannot keep the rules for calls.
        """
        model, options, caller = self.model, self.options, self.lease.caller
        token_ids = encoded.token_ids
        packed = pack_uint32(token_ids)
        own = continue_form(model.reply_format, prompt, options.sampling)
        reply = plan_reply(
            model.reply_format,
            prompt,
            token_ids,
            own,
            replies=self.replies,
        )
        token_bytes = model.tokenizer.token_bytes(show_special_tokens=options.show_special_tokens)
        if reply is not None and not options.show_special_tokens:
            token_bytes = reply.token_bytes
        sampling = own if reply is None else reply.sampling
        # Nothing else waits at the engine before its admission.
        is_structured = sampling is not None and sampling.HasField("structured_output")
        min_tokens = _min_tokens(options, model.info)

        def new_sample(index: int, index_of_prompt: int) -> Generation:
            request = EngineRequest(
                request_id=caller.engine_request_id(sample_id(options.request_id, index)),
                prompt_token_ids=packed,
                images=encoded.images,
                sampling=sampling_of(sampling, index_of_prompt),
                priority=options.priority,
                cache_salt=caller.cache_salt(options.cache_salt),
                adapter=model.adapter,
                adapter_digest=model.adapter_digest,
                caller=self.lease.opaque_account if is_structured else "",
                deadline_s=self.deadline_s,
                traceparent=self.traceparent,
            )
            detokenizer = Detokenizer(token_bytes, token_ids[-PROMPT_TAIL_TOKENS:])
            stops = StopStrings(options.stop, are_shown=options.show_stop)
            text: OutputText | ReplyText
            if reply is None:
                text = OutputText(detokenizer, stops, min_tokens=min_tokens)
            else:
                text = ReplyText(detokenizer, reply.new_reader(), stops, min_tokens=min_tokens)
            return Generation(
                options.request_id,
                TokenStream(self.engine, request, model=model.info),
                text,
                lease=self.lease,
                prompt_token_ids=token_ids,
                has_output=options.has_output,
                stop_token_bytes=token_bytes if options.show_stop else None,
            )

        return new_sample


def _min_tokens(options: Options, info: ModelInfo) -> int:
    """Returns the number of output tokens before which stop strings do not count."""
    sampling = options.sampling
    if sampling is not None and sampling.HasField("min_tokens"):
        return sampling.min_tokens
    return info.default_sampling.min_tokens
