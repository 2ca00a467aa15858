"""Fields of requests that change no answer, whatever they say or because of what they say."""

from typing import Any, Literal

from services.frontend.http.request_body import Body


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

    skip_special_tokens: Literal[True] | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    include_stop_str_in_output: Literal[False] | None = None
    use_beam_search: Literal[False] | None = None
    return_token_ids: Literal[False] | None = None
    return_tokens_as_token_ids: Literal[False] | None = None
    priority: Literal[0] | None = None


class NeutralCompletionFields(NeutralFields):
    """The same of completions."""

    add_special_tokens: Literal[True] | None = None


class NeutralChatFields(NeutralFields):
    """The same of chats."""

    add_special_tokens: Literal[False] | None = None
    add_generation_prompt: Literal[True] | None = None
    continue_final_message: Literal[False] | None = None
    echo: Literal[False] | None = None
    include_reasoning: Literal[True] | None = None
