"""Fields of requests that change no answer, whatever they say or because of what they say."""

from typing import Annotated, Any, Literal

from pydantic import Field

from services.frontend.http.fields.body import TAKEN, Body


class CacheControl(Body):
    """Where a cached prefix may end; the engine caches every full block of a prompt anyway."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    scope: Annotated[str | None, TAKEN] = None


class CachedBody(Body):
    """Part of a body that may end a cached prefix."""

    cache_control: CacheControl | None = None


class InertFields(Body):
    """Fields that cannot change an answer. They are checked for their types and not used."""

    user: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None


class NeutralFields(Body):
    """Fields of other servers, with the only value that is served: what happens anyway.

    Programs that write all fields of a request write these.
    """

    spaces_between_special_tokens: Literal[True] | None = None
    use_beam_search: Literal[False] | None = None
    return_token_ids: Literal[False] | None = None
    return_tokens_as_token_ids: Literal[False] | None = None
    priority: Literal[0] | None = None
    length_penalty: Annotated[float, Field(ge=1, le=1)] | None = None


class NeutralCompletionFields(NeutralFields):
    """The same of completions."""

    add_special_tokens: Literal[True] | None = None


class NeutralChatFields(NeutralFields):
    """The same of chats."""

    add_special_tokens: Literal[False] | None = None
    include_reasoning: Literal[True] | None = None
    separate_reasoning: Literal[True] | None = None
    stream_reasoning: Literal[True] | None = None
