"""How large a prompt is."""

import asyncio

import pytest

from services.frontend.errors import InvalidRequestError
from services.frontend.pipeline import prompt_size
from services.frontend.pipeline.prompt_size import (
    MAX_VALUES,
    check_json_texts,
    check_prompt_size,
    check_text_size,
)
from services.frontend.pipeline.request import Conversation

LIMITS = {"max_bytes": 2**20, "max_tokens": 1000}


def conversation(parameters):
    tool = {"type": "function", "function": {"name": "a", "parameters": parameters}}
    return Conversation([{"role": "user", "content": "x"}], [tool])


class Endless(list):
    """A list that says how long it is, and must not be looked at."""

    def __len__(self):
        return 10**9

    def __iter__(self):
        raise AssertionError("it was looked at")


@pytest.mark.parametrize("value", [{}, [], 1, "", None, {"a": []}])
def test_every_value_counts(value):
    with pytest.raises(InvalidRequestError, match=f"over {MAX_VALUES} values"):
        check_prompt_size(conversation({"x": [value] * MAX_VALUES}), **LIMITS)


def test_empty_objects_take_bytes():
    few = conversation({"x": [{}, []] * 5000})
    check_prompt_size(few, **LIMITS)
    with pytest.raises(InvalidRequestError, match=r"the prompt has 200\d\d bytes; the limit is"):
        check_prompt_size(few, max_bytes=20_000, max_tokens=1000)


def test_what_is_too_long_is_not_looked_at():
    with pytest.raises(InvalidRequestError, match="values"):
        check_prompt_size(conversation({"x": Endless()}), **LIMITS)


def test_a_number_that_is_too_long_to_be_written_is_refused():
    check_prompt_size(conversation({"x": 2**1024 - 1}), **LIMITS)
    with pytest.raises(InvalidRequestError, match="a number of 1025 bits"):
        check_prompt_size(conversation({"x": 2**1024}), **LIMITS)


def test_large_honest_conversations_pass():
    message = {"role": "user", "content": "x" * 200}
    schema = {name: {"type": "string", "description": "d"} for name in map(str, range(20))}
    tool = {"type": "function", "function": {"name": "a", "parameters": {"properties": schema}}}
    check_prompt_size(Conversation([message] * 4096, [tool] * 128), **LIMITS)


def test_text_and_token_ids_have_limits_of_their_own():
    check_prompt_size("é" * 2**19, **LIMITS)
    check_prompt_size([1] * 999, **LIMITS)
    with pytest.raises(InvalidRequestError, match="has 1048578 bytes; the limit is 1048576"):
        check_prompt_size("é" * (2**19 + 1), **LIMITS)
    with pytest.raises(InvalidRequestError, match="too long: 1000 tokens"):
        check_prompt_size([1] * 1000, **LIMITS)


async def test_others_run_while_a_conversation_is_measured(monkeypatch):
    monkeypatch.setattr(prompt_size, "_STEP_VALUES", 10)
    num_runs = 0

    async def others():
        nonlocal num_runs
        while True:
            num_runs += 1
            await asyncio.sleep(0)

    running = asyncio.create_task(others())
    await check_text_size(conversation({"x": [1] * 1000}), max_bytes=2**20)
    running.cancel()
    assert num_runs >= 100


def test_json_is_measured_before_it_is_parsed():
    check_json_texts(['{"a": [1, 2]}'] * 1000, "the arguments")
    for text in ("[" + "{}," * MAX_VALUES, "[" + '"",' * 3 * MAX_VALUES, "[" * (MAX_VALUES + 1)):
        with pytest.raises(InvalidRequestError, match="the arguments hold over"):
            check_json_texts([text], "the arguments")
    with pytest.raises(InvalidRequestError, match="values"):
        check_json_texts(["[1,1,1]"] * MAX_VALUES, "the arguments")


def test_commas_in_strings_of_json_are_no_values():
    check_json_texts(['{"code": "' + r"f(a, b)[0], \"c\", " * MAX_VALUES + '"}'], "the arguments")
