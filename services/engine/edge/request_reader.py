"""Reads requests from protobuf, with every check that needs no scheduler."""

import random
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from protos.common.v1 import sampling_pb2
from protos.engine.v1.engine_pb2 import GenerateRequest, Submit
from services.engine.checkpoint.model_folder import ModelFolder
from services.engine.core.adapters import Adapters, adapter_named
from services.engine.edge.prompt_images import read_images
from services.engine.edge.session_images import SessionImages
from services.engine.edge.structured_output import structured_output_of
from services.engine.edge.task import check_task
from services.engine.edge.token_rules import check_token_id, read_token_rules
from services.engine.errors import InvalidRequestError, UnsupportedError
from services.engine.patch_memory import PatchMemory
from services.engine.request import (
    MAX_LOGIT_BIAS,
    MAX_PRIORITY,
    MAX_STOP_TOKEN_IDS,
    OutputSink,
    Request,
    SamplingParams,
)
from services.engine.structured_output import StructuredOutput
from services.telemetry.trace_context import checked_traceparent

MAX_NAME_LENGTH = 128
"""Characters in a cache salt or a frontend id."""
MAX_REQUEST_ID_LENGTH = 256
"""Characters in a request id: the caller's, plus the frontend's suffix."""

PROMPT = "prompt_token_ids"
MAX_SEED_BITS = 64

MAX_PROMPT_LOGPROBS = 100_000
"""Log-probabilities of a prompt, which fit in one message of 1.4 MB."""

_TOKEN_ID = np.dtype("<u4")
_NO_SAMPLING = SamplingParams(temperature=0, seed=0, max_tokens=1)
"""Sampling of a request for a vector, which takes the place of its one token."""


def check_known(message: Message) -> None:
    """Refuses a message with unknown fields at any depth.

    Raises:
        UnsupportedError: it has one; ignoring it would be silent.
    """
    unknown = UnknownFieldSet(message)
    if len(unknown):
        raise UnsupportedError(
            f"{message.DESCRIPTOR.name} has the field {unknown[0].field_number}, "
            "which this engine does not know"
        )
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for child in value if field.is_repeated else (value,):
            check_known(child)


def check_name(name: str, what: str, limit: int = MAX_NAME_LENGTH) -> None:
    """Raises InvalidRequestError if a name is longer than its limit."""
    if len(name) > limit:
        raise InvalidRequestError(
            f"{what} has {len(name)} characters; the limit is {limit}", field=what
        )


@dataclass(frozen=True, slots=True)
class RequestReader:
    """Reads requests for one model."""

    model: ModelFolder
    max_grammar_bytes: int = 2**16
    adapters: Adapters | None = None
    """The adapters that requests may name; None: none."""
    patch_memory: PatchMemory | None = None
    """Takes the images of sessions; None keeps them in this process alone."""

    def session_images(self) -> SessionImages:
        """Returns the store of a new session's images."""
        image_input = self.model.image_input
        if image_input is None:
            return SessionImages(max_bytes=0)
        return SessionImages(image_input.max_bytes, image_input.check, self.patch_memory)

    def from_submit(self, submit: Submit, sink: OutputSink, images: SessionImages) -> Request:
        """Reads a request of a session, which holds its images.

        Raises:
            InvalidRequestError, UnsupportedError: it is invalid.
        """
        check_known(submit)
        if not submit.request_id:
            raise InvalidRequestError(
                "request_id is empty; a session names its requests", field="request_id"
            )
        check_name(submit.request_id, "request_id", MAX_REQUEST_ID_LENGTH)
        check_name(submit.cache_salt, "cache_salt")
        check_name(submit.caller, "caller")
        if len(submit.prompt_token_ids) % _TOKEN_ID.itemsize:
            raise InvalidRequestError(
                f"prompt_token_ids has {len(submit.prompt_token_ids)} bytes; each token takes 4",
                field=PROMPT,
            )
        arrival_s = time.monotonic()
        check_task(self.model, pools=submit.pool, has_sampling=submit.HasField("sampling"))
        packed = np.frombuffer(submit.prompt_token_ids, _TOKEN_ID)
        self._check_prompt_length(len(packed))
        self._check_token_id(PROMPT, int(packed.max()))
        token_ids = packed.tolist()
        num_prompt = len(token_ids) - submit.num_resumed_tokens
        if num_prompt < 1:
            raise InvalidRequestError(
                f"num_resumed_tokens is {submit.num_resumed_tokens}; it must be below the"
                f" {len(token_ids)} tokens given",
                field="num_resumed_tokens",
            )
        return Request(
            request_id=submit.request_id,
            handle=submit.handle,
            prompt_token_ids=token_ids[:num_prompt],
            images=read_images(submit.images, images, packed[:num_prompt], self.model.image_input),
            resumed_token_ids=token_ids[num_prompt:],
            # A request with tokens already got its prompt log-probabilities.
            num_prompt_logprobs=num_prompt - 1 if submit.num_resumed_tokens else 0,
            sampling=_NO_SAMPLING if submit.pool else self._sampling(submit.sampling, num_prompt),
            sink=sink,
            priority=_priority(submit.priority),
            cache_salt=submit.cache_salt,
            adapter=adapter_named(self.adapters, submit.adapter, model=self.model.name),
            caller=submit.caller,
            traceparent=checked_traceparent(submit.traceparent),
            arrival_s=arrival_s,
            deadline_s=(
                arrival_s + submit.timeout_ms / 1000 if submit.HasField("timeout_ms") else None
            ),
            structured_output=self._structured_output(submit.sampling),
        )

    def from_generate(
        self,
        message: GenerateRequest,
        sink: OutputSink,
        *,
        timeout_s: float | None,
        traceparent: str = "",
    ) -> Request:
        """Reads a request with its own call.

        Raises:
            InvalidRequestError, UnsupportedError: it is invalid.
            UnknownModelError: it names another model.
        """
        check_known(message)
        check_name(message.request_id, "request_id", MAX_REQUEST_ID_LENGTH)
        check_name(message.cache_salt, "cache_salt")
        check_task(self.model, pools=False)
        arrival_s = time.monotonic()
        self._check_prompt_length(len(message.prompt_token_ids))
        prompt = list(message.prompt_token_ids)
        self._check_token_ids(PROMPT, prompt)
        return Request(
            request_id=message.request_id or uuid.uuid4().hex,
            handle=0,
            prompt_token_ids=prompt,
            sampling=self._sampling(message.sampling, len(prompt)),
            sink=sink,
            priority=_priority(message.priority),
            cache_salt=message.cache_salt,
            adapter=adapter_named(self.adapters, message.model, model=self.model.name),
            arrival_s=arrival_s,
            deadline_s=None if timeout_s is None else arrival_s + timeout_s,
            traceparent=traceparent,
            structured_output=self._structured_output(message.sampling),
        )

    def default_sampling(self) -> sampling_pb2.SamplingParams:
        """Returns the default sampling, for clients to show."""
        defaults = self.model.default_sampling
        return sampling_pb2.SamplingParams(
            temperature=defaults.temperature,
            top_k=defaults.top_k,
            top_p=defaults.top_p,
            min_p=defaults.min_p,
            repetition_penalty=defaults.repetition_penalty,
            frequency_penalty=0.0,
            presence_penalty=0.0,
            ignore_eos=False,
            min_tokens=0,
        )

    def _check_prompt_length(self, length: int) -> None:
        """Checks the length before any token becomes an object."""
        if not length:
            raise InvalidRequestError(
                "the prompt is empty; it needs at least one token", field=PROMPT
            )
        limit = self.model.max_prompt_len
        if length > limit:
            room = (
                ""
                if self.model.pooling
                else (f", which leaves one for output in a context of {self.model.max_model_len}")
            )
            raise InvalidRequestError(
                f"the prompt has {length} tokens; the limit is {limit}{room}", field=PROMPT
            )

    def _check_token_ids(self, what: str, token_ids: Iterable[int]) -> None:
        self._check_token_id(what, max(token_ids, default=0))

    def _check_token_id(self, what: str, largest: int) -> None:
        check_token_id(what, largest, self.model.vocab_size)

    def _sampling(self, given: sampling_pb2.SamplingParams, num_prompt: int) -> SamplingParams:
        """Fills in all defaults; the context length bounds max_tokens."""
        if len(given.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError(
                f"stop_token_ids has {len(given.stop_token_ids)} entries; "
                f"the limit is {MAX_STOP_TOKEN_IDS}",
                field="stop_token_ids",
            )
        if len(given.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequestError(
                f"logit_bias has {len(given.logit_bias)} entries; the limit is {MAX_LOGIT_BIAS}",
                field="logit_bias",
            )
        self._check_token_ids("stop_token_ids", given.stop_token_ids)
        self._check_token_ids("logit_bias", given.logit_bias)
        if given.HasField("max_tokens") and given.max_tokens == 0:
            raise InvalidRequestError("max_tokens is 0; it must be at least 1", field="max_tokens")
        defaults = self.model.default_sampling
        room = self.model.max_model_len - num_prompt
        has = given.HasField
        return SamplingParams(
            temperature=given.temperature if has("temperature") else defaults.temperature,
            top_k=given.top_k if has("top_k") else defaults.top_k,
            top_p=given.top_p if has("top_p") else defaults.top_p,
            min_p=given.min_p if has("min_p") else defaults.min_p,
            repetition_penalty=(
                given.repetition_penalty
                if has("repetition_penalty")
                else defaults.repetition_penalty
            ),
            frequency_penalty=given.frequency_penalty,
            presence_penalty=given.presence_penalty,
            seed=given.seed if has("seed") else random.getrandbits(MAX_SEED_BITS),
            logit_bias=tuple(sorted(given.logit_bias.items())),
            **read_token_rules(given, self.model.vocab_size),
            end_token_ids=self._end_token_ids(given),
            min_tokens=given.min_tokens,
            max_tokens=min(given.max_tokens, room) if has("max_tokens") else room,
            logprobs=given.logprobs if has("logprobs") else None,
            prompt_logprobs=self._num_prompt_logprobs(given, num_prompt),
            num_speculative_tokens=(
                given.num_speculative_tokens if has("num_speculative_tokens") else None
            ),
        )

    def _num_prompt_logprobs(
        self, given: sampling_pb2.SamplingParams, num_prompt: int
    ) -> int | None:
        if not given.HasField("prompt_logprobs"):
            return None
        num_entries = num_prompt * (1 + given.prompt_logprobs)
        if num_entries > MAX_PROMPT_LOGPROBS:
            raise InvalidRequestError(
                f"prompt_logprobs of {given.prompt_logprobs} for {num_prompt} prompt tokens are "
                f"{num_entries} log-probabilities; the limit is {MAX_PROMPT_LOGPROBS}",
                field="prompt_logprobs",
            )
        return int(given.prompt_logprobs)

    def _structured_output(self, given: sampling_pb2.SamplingParams) -> StructuredOutput | None:
        if not given.HasField("structured_output"):
            return None
        if given.ignore_eos and given.structured_output.WhichOneof("grammar") is not None:
            raise InvalidRequestError(
                "structured_output cannot go with ignore_eos: it must end", field="ignore_eos"
            )
        return structured_output_of(given.structured_output, self.max_grammar_bytes)

    def _end_token_ids(self, given: sampling_pb2.SamplingParams) -> frozenset[int]:
        own = frozenset(given.stop_token_ids)
        return own if given.ignore_eos else own | self.model.eos_token_ids


def _priority(priority: int) -> int:
    if abs(priority) > MAX_PRIORITY:
        raise InvalidRequestError(
            f"priority is {priority}; it must be in [{-MAX_PRIORITY}, {MAX_PRIORITY}]",
            field="priority",
        )
    return priority
