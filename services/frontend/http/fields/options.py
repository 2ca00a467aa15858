"""Converts fields of parsed bodies to the options of a request."""

import json
from typing import Any

from services.frontend.engine_client.messages import (
    SamplingParams,
    StructuredOutput,
    Tag,
    TaggedText,
    TextChoice,
)
from services.frontend.errors import InvalidRequestError
from services.frontend.http.fields.generation import (
    GenerationFields,
    ResponseFormat,
    StructuredOutputs,
)
from services.frontend.pipeline.prompt_size import MAX_PROMPT_TOKENS
from services.frontend.pipeline.request import Options

NO_SEED = -1
"""A seed that means none, as at other servers."""
ALL_THAT_FIT = -1
"""truncate_prompt_tokens that keeps as many tokens as the model takes, as at other servers."""
ALL_TOKENS = -1
"""top_k that keeps all tokens, as at other servers."""

_PASSED_ON = (
    "temperature",
    "top_p",
    "seed",
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "allowed_token_ids",
    "num_speculative_tokens",
)
"""Fields with the same name and meaning in SamplingParams."""


def options_of(
    request: GenerationFields,
    request_id: str,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    num_samples: int | None = None,
    prompt_logprobs: int | None = None,
    truncate_prompt_tokens: int | None = None,
    response_format: ResponseFormat | None = None,
) -> Options:
    """Returns the options of a request; None counts as absent.

    Raises:
        InvalidRequestError: there is more than one form of output.
    """
    named: dict[str, Any] = {name: getattr(request, name) for name in _PASSED_ON}
    named |= {
        # The engine always samples a token after the prompt; without output it is left out.
        "max_tokens": 1 if max_tokens == 0 else max_tokens,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
    }
    if named["seed"] == NO_SEED:
        named["seed"] = None
    if named["seed"] is not None:
        named["seed"] %= 2**64  # the engine's seeds have no sign
    if named["top_k"] == ALL_TOKENS:
        named["top_k"] = 0
    named["structured_output"] = structured_output_of(request.structured_outputs, response_format)
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or ()
    return Options(
        model=request.model,
        request_id=request_id,
        sampling=SamplingParams(
            **{name: value for name, value in named.items() if value is not None}
        ),
        stop=tuple(stop),
        bad_words=tuple(request.bad_words or ()),
        show_stop=bool(request.include_stop_str_in_output),
        show_special_tokens=request.skip_special_tokens is False,
        cache_salt=request.cache_salt or "",
        num_samples=1 if num_samples is None else num_samples,
        has_output=max_tokens != 0,
        parse_special_tokens=request.parse_special_tokens,
        truncate_prompt_tokens=(
            MAX_PROMPT_TOKENS if truncate_prompt_tokens == ALL_THAT_FIT else truncate_prompt_tokens
        ),
    )


def template_variables_of(
    given: dict[str, Any] | None, effort: str | None, verbosity: str | None, *, field: str
) -> dict[str, Any]:
    """Returns the variables for the chat template; `field` has the effort of reasoning.

    Raises:
        InvalidRequestError: the variables have another effort.
    """
    variables = given_variables(given)
    if effort is not None:
        if variables.get("reasoning_effort", effort) != effort:
            raise InvalidRequestError(
                f"{field} and chat_template_kwargs contradict each other", field=field
            )
        variables["reasoning_effort"] = effort
    if verbosity is not None:
        variables.setdefault("verbosity", verbosity)
    return variables


def given_variables(variables: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the variables that are not null."""
    return {name: value for name, value in (variables or {}).items() if value is not None}


def structured_output_of(
    wanted: StructuredOutputs | None, response_format: ResponseFormat | None
) -> StructuredOutput | None:
    """Returns the form for the engine; None allows any output.

    Raises:
        InvalidRequestError: there is more than one form, or an empty one.
    """
    by_format = None if response_format is None else _of_format(response_format)
    if wanted is None:
        return by_format
    if by_format is not None:
        raise InvalidRequestError(
            "response_format and structured_outputs exclude each other", field="structured_outputs"
        )
    given = [name for name in type(wanted).model_fields if getattr(wanted, name) is not None]
    if len(given) != 1:
        raise InvalidRequestError(
            f"structured_outputs has {len(given)} forms of output; it must have 1",
            field="structured_outputs",
        )
    if wanted.json_schema is not None:
        return StructuredOutput(json_schema=_schema_text(wanted.json_schema))
    if wanted.choice is not None:
        return StructuredOutput(choice=TextChoice(texts=wanted.choice))
    return StructuredOutput(json_object=wanted.json_object, regex=wanted.regex, lark=wanted.grammar)


def _of_format(wanted: ResponseFormat) -> StructuredOutput | None:
    if wanted.json_schema is not None:
        return StructuredOutput(json_schema=_schema_text(wanted.json_schema.schema_))
    if wanted.structures is not None:
        tags = [
            Tag(begin=each.begin, json_schema=_schema_text(each.schema_), end=each.end)
            for each in wanted.structures
        ]
        tagged = TaggedText(tags=tags, triggers=wanted.triggers, has_text_between=True)
        return StructuredOutput(tagged=tagged)
    return StructuredOutput(json_object=True) if wanted.type == "json_object" else None


def _schema_text(schema: str | dict[str, Any]) -> str:
    return schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
