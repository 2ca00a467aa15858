"""Hostile chat templates cost their own requests and no others anything."""

import asyncio
import contextlib
import gc
import os

import psutil
import pytest

from services.frontend.errors import (
    EngineUnavailableError,
    InvalidRequestError,
    OverloadedError,
)
from services.frontend.text.template_process import TemplateProcess
from services.frontend.text.template_source import TemplateSource
from services.frontend.text.tokenizer import TokenizerFilesError
from tests.support.child_processes import children_that_run
from tests.support.loop_time import LoopTime
from tests.support.waiting import until

WORKER = "services.frontend.text.template_worker"
HELLO = [{"role": "user", "content": "hello"}]
SLEEPLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
ON_WISH = "{% if messages[0].content == 'hang' %}" + SLEEPLESS + "{% endif %}fine"
HANG = [{"role": "user", "content": "hang"}]


@contextlib.asynccontextmanager
async def running(source: str, *, timeout_s: float = 60):
    template = TemplateProcess(TemplateSource(source, {"bos_token": "<s>"}), timeout_s=timeout_s)
    try:
        await template.start()
        yield template
    finally:
        await template.close()


def children() -> set[int]:
    """The processes of templates."""
    return {child.pid for child in children_that_run(WORKER)}


async def test_conversations_are_rendered_one_after_the_other():
    async with running("{{ bos_token }}{{ messages[0].content }}") as template:
        prompts = await asyncio.gather(
            *(
                template.render([{"role": "user", "content": f"é{n}\0"}], max_bytes=100)
                for n in range(20)
            )
        )
    assert prompts == [f"<s>é{n}\0" for n in range(20)]


@pytest.mark.parametrize(
    "source",
    [
        SLEEPLESS,
        # One C function that does not return for years.
        "{% set n = messages | length %}{{ (n + 8) ** ((n + 8) ** (n + 8)) }}",
    ],
)
async def test_a_template_without_end_is_stopped_while_the_event_loop_goes_on(source):
    async with running(source) as template:
        rendering = asyncio.create_task(template.render(HELLO, max_bytes=100))
        for _ in range(20):
            await asyncio.sleep(0.01)
        assert not rendering.done()
        LoopTime().wind(60)
        with pytest.raises(InvalidRequestError, match="took over 60 s"):
            await rendering


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content * 10**9 }}",
        "{{ '%999999999d' % messages | length }}",
        "{% set s = namespace(x=messages[0].content) %}"
        "{% for i in range(60) %}{% set s.x = s.x ~ s.x %}{% endfor %}{{ s.x | length }}",
    ],
)
async def test_a_template_gets_only_so_much_memory(source):
    async with running(source) as template:
        with pytest.raises(InvalidRequestError, match="too much memory"):
            await template.render(HELLO, max_bytes=100)


async def test_after_a_stop_the_next_conversation_is_rendered_as_ever():
    async with running(ON_WISH) as template:
        before = children()
        hanging = asyncio.create_task(template.render(HANG, max_bytes=100))
        for _ in range(20):
            await asyncio.sleep(0.01)
        LoopTime().wind(60)
        with pytest.raises(InvalidRequestError, match="took over"):
            await hanging
        assert not before & children()
        assert await template.render(HELLO, max_bytes=100) == "fine"


async def test_a_request_that_waits_for_one_that_hangs_is_refused_with_a_retry():
    async with running(ON_WISH, timeout_s=0.5) as template:
        hanging = asyncio.create_task(template.render(HANG, max_bytes=100))
        await asyncio.sleep(0)
        crowd = [template.render(HANG, max_bytes=100) for _ in range(10)]
        ends = await asyncio.gather(*crowd, hanging, return_exceptions=True)
    assert {type(end) for end in ends} == {InvalidRequestError, OverloadedError}


async def test_accounts_take_turns():
    ends: list[str] = []

    async def render(name: str) -> None:
        said = [{"role": "user", "content": name}]
        ends.append(await template.render(said, max_bytes=100, account=name[0]))

    async with running("{{ messages[0].content }}") as template:
        await asyncio.gather(*map(render, ["a1", "a2", "a3", "a4", "b1"]))
    assert ends == ["a1", "a2", "b1", "a3", "a4"]


async def test_a_caller_that_goes_away_leaves_no_answer_for_the_next():
    async with running("{{ messages[0].content }}") as template:
        leaving = asyncio.create_task(template.render(HANG, max_bytes=100))
        await asyncio.sleep(0)
        leaving.cancel()
        assert await template.render(HELLO, max_bytes=100) == "hello"
        assert len(children()) == 1


async def test_the_first_conversation_after_the_death_of_the_process_is_rendered():
    async with running("{{ messages[0].content }}") as template:
        [pid] = children()
        os.kill(pid, 9)
        assert await template.render(HELLO, max_bytes=100) == "hello"
        assert pid not in children()


async def test_without_a_new_process_a_conversation_may_be_tried_again(monkeypatch):
    async with running("{{ messages[0].content }}") as template:
        [pid] = children()
        os.kill(pid, 9)
        with monkeypatch.context() as patch:
            patch.setattr("sys.executable", "/nowhere/python")
            with pytest.raises(EngineUnavailableError, match="could not be started; try again"):
                await template.render(HELLO, max_bytes=100)
        assert await template.render(HELLO, max_bytes=100) == "hello"


async def test_a_template_sees_no_environment(monkeypatch):
    monkeypatch.setenv("OCTAVO_SECRET", "hidden")
    async with running("x"):
        [pid] = children()
        assert set(psutil.Process(pid).environ()) <= {
            "PYTHONPATH",
            "PYTHONSAFEPATH",
            "LC_CTYPE",
        }


@pytest.mark.parametrize("source", ["{% if %}", "{{ 1 / }}", "{% set a.b.c = 1 %}"])
async def test_a_template_that_cannot_be_compiled_is_refused_when_it_is_read(source):
    with pytest.raises(TokenizerFilesError, match="chat template"):
        async with running(source):
            pass
    await until(lambda: not children())


async def test_a_closed_template_starts_no_process():
    async with running("x") as template:
        pass
    with pytest.raises(EngineUnavailableError):
        await template.render(HELLO, max_bytes=100)
    assert not children()


async def test_a_refusal_that_its_caller_does_not_wait_for_is_not_logged():
    complaints = []
    asyncio.get_running_loop().set_exception_handler(lambda _, facts: complaints.append(facts))
    async with running("{{ raise_exception(messages[0].content) }}") as template:
        leaving = asyncio.create_task(template.render(HELLO, max_bytes=100))
        await asyncio.sleep(0)  # it has begun
        leaving.cancel()
        with pytest.raises(InvalidRequestError):  # after the first one
            await template.render(HELLO, max_bytes=100)
    gc.collect()
    assert complaints == []
