"""Parts of scripts/try_clients: the scripted model, an agent's run and the table."""

import dataclasses
import json
import subprocess
import zipfile
from types import SimpleNamespace

import pytest

from services.frontend.text.stand_ins import with_written_tools
from tests.clients import environments, table
from tests.clients.agents import AGENTS, AgentAt, Served, failures_in, try_agent
from tests.clients.environments import Program
from tests.clients.screens import draw
from tests.clients.trial import Report
from tests.support import scripted_model
from tests.support.scripted_model import COMMAND, DONE, DONE_AGAIN, TASK, reply_to

WORKS = Report("agent", "1.0", [("a task", None)])


def _function(name, required=(), **properties):
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def _prompt(tools, *turns):
    """A prompt of a template without tools, with the tools as the server writes them."""
    messages = [{"role": "user", "content": turn} for turn in turns]
    lines = [
        f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
        for message in with_written_tools(messages, tools)
    ]
    return "".join([*lines, "<|im_start|>assistant\n"])


def _called(prompt):
    reply = reply_to(prompt, reasons=False)
    assert reply.startswith("<tool_call>"), reply
    return json.loads(reply.removeprefix("<tool_call>").removesuffix("</tool_call>"))


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        (_function("Bash", ["command"], command={"type": "string"}), {"command": COMMAND}),
        (_function("ns__exec_command", ["cmd"], cmd={"type": "string"}), {"cmd": COMMAND}),
        (
            _function("run_commands", ["commands"], commands={"type": "array"}),
            {"commands": [COMMAND]},
        ),
        (
            _function("shell", ["command"], command={"type": "array"}),
            {"command": ["bash", "-lc", COMMAND]},
        ),
        (
            _function("bash", ["command", "wait"], command={}, wait={"type": "boolean"}, at={}),
            {"command": COMMAND, "wait": False},
        ),
    ],
)
def test_the_scripted_model_calls_the_tool_that_runs_commands(tool, arguments):
    read = _function("Read", ["path"], path={"type": "string"})
    call = _called(_prompt([read, tool], "Be brief.", TASK))
    assert call == {"name": tool["function"]["name"], "arguments": arguments}


def test_the_scripted_model_finds_its_tools_after_another_section_of_tools():
    tool = _function("bash", ["command"], command={"type": "string"})
    turn = f"<tools>\nUse them well.\n</tools>\n{TASK}"
    assert _called(f"<|im_start|>system\n<tools>\nbash\n</tools>{_prompt([tool], turn)}")


def test_the_scripted_model_reads_a_picture_and_says_how_large_it_is():
    look = scripted_model.LOOK.format(path="/w/picture.png")
    read = _function("Read", ["file_path"], file_path={"type": "string"})
    expected = {"name": "Read", "arguments": {"file_path": "/w/picture.png"}}
    assert _called(_prompt([read], look)) == expected
    shown = scripted_model.IMAGE * 2
    assert reply_to(_prompt([read], look, shown), reasons=False) == scripted_model.SEEN


def test_the_scripted_model_says_that_it_is_done_after_the_result():
    result = "<tool_response>\noctavo\n</tool_response>"
    shell = _function("Bash", ["command"], command={"type": "string"})
    assert reply_to(_prompt([shell], TASK, result, "A reminder."), reasons=False) == DONE
    again = _prompt([shell], TASK, result, DONE, TASK)
    assert _called(again)["name"] == "Bash"
    again = _prompt([shell], TASK, result, DONE, TASK, result)
    assert reply_to(again, reasons=True).endswith(f"</think>\n\n{DONE_AGAIN}")


def test_the_scripted_model_ends_with_the_tool_that_ends():
    finish = _function("submit_and_exit", ["summary"], summary={"type": "string"})
    prompt = _prompt([finish], TASK, "<tool_response>\noctavo\n</tool_response>")
    assert _called(prompt) == {"name": "submit_and_exit", "arguments": {"summary": DONE}}


def test_the_scripted_model_lists_files_where_that_is_asked_for():
    reply = reply_to(_prompt([], f"Return a {scripted_model.LISTING}.", TASK), reasons=False)
    assert reply == f"made.txt\n```\noctavo\n```\n\n{DONE}"


def _agent_that(folder, script, log=""):
    """Returns the arguments of a trial of a program that stands in for Claude Code."""
    program = folder / "claude"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    served = Served("plain", SimpleNamespace(log=log), "http://127.0.0.1:1")
    return "claude_code", Program(program, "2.0"), served, folder / "agent"


def test_an_agent_that_does_the_task_works(tmp_path):
    report = Report("agent")
    script = f'case "$*" in *--continue*) s="{DONE_AGAIN}";; *) s="{DONE}";; esac\n'
    try_agent(report, *_agent_that(tmp_path, f'{script}{COMMAND}\necho "$s"'))
    assert report.version == "2.0"
    assert len(report.trials) == 3
    assert [error for _, error in report.trials if error] == []


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (f"echo {DONE}", "no made.txt"),
        (f"{COMMAND}; exit 3", "exit status 3"),
        (f"{COMMAND}; echo Perhaps.", "Perhaps"),
    ],
)
def test_an_agent_that_fails_has_a_reason_and_no_second_turn(tmp_path, script, message):
    report = Report("agent")
    try_agent(report, *_agent_that(tmp_path, script))
    assert len(report.trials) == 2
    assert message in report.trials[0][1]


def test_refused_requests_are_read_from_the_log():
    event = {"event": "request_failed", "method": "HttpChat", "error": "InvalidRequestError"}
    lines = ["Traceback", json.dumps({"event": "request_finished"}), json.dumps(event)]
    assert failures_in("\n".join(lines)) == ["HttpChat InvalidRequestError"]


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_gets_the_url_and_the_task(name, tmp_path):
    agent = AgentAt(name, Program(tmp_path / "program", "1"), "http://127.0.0.1:1", tmp_path)
    assert TASK in agent.command("first")
    files = [path.read_text() for path in agent.home.rglob("*") if path.is_file()]
    prepared = agent.command("prepare") if "prepare" in AGENTS[name] else []
    told = " ".join([*agent.environment.values(), *files, *prepared])
    assert "http://127.0.0.1:1" in told
    assert "$" not in told.replace(agent.environment["PATH"], "")


def test_each_table_of_the_page_is_written_alone(tmp_path):
    page = tmp_path / "clients.md"
    table.write([WORKS], page)
    table.write_agents([dataclasses.replace(WORKS, package="claude")], page)
    table.write([dataclasses.replace(WORKS, version="2.0")], page)
    text = page.read_text()
    assert text.index("| agent | 2.0 | a task | works |") < text.index("## Agents")
    assert text.index("## Agents") < text.index("| claude | 1.0 | a task | works |")
    table.write_agents([dataclasses.replace(WORKS, package="codex")], page)
    assert "claude |" not in page.read_text()
    assert page.read_text().count("## Agents") == 1
    table.write_newest([dataclasses.replace(WORKS, package="newer")], page)
    table.write_agents([WORKS], page)
    assert page.read_text().index("## Agents") < page.read_text().index("| newer | 1.0 |")
    assert page.read_text().count("| newer | 1.0 |") == 1


def test_a_screen_keeps_what_xml_would_read():
    picture = draw(["> a && b", ""], title="claude")
    assert "&gt; a &amp;&amp; b</text>" in picture
    assert picture.count("<text ") == 1


@pytest.mark.slow
def test_an_environment_that_was_moved_is_made_again(tmp_path, monkeypatch):
    wheel = tmp_path / "hello-1.0-py3-none-any.whl"
    about = {
        "METADATA": "Metadata-Version: 2.1\nName: hello\nVersion: 1.0\n",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "entry_points.txt": "[console_scripts]\nhello = hello:main\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("hello.py", "def main():\n    print('hello')\n")
        for name, text in about.items():
            archive.writestr(f"hello-1.0.dist-info/{name}", text)
    monkeypatch.setattr(environments, "CLIENTS", {"hello": {"packages": [str(wheel)]}})
    monkeypatch.setattr(environments, "ENVIRONMENTS", tmp_path / "here")
    environments.driver_of("hello")
    moved = (tmp_path / "here").rename(tmp_path / "there")
    monkeypatch.setattr(environments, "ENVIRONMENTS", moved)
    environments.driver_of("hello")
    said = subprocess.run([moved / "hello/bin/hello"], capture_output=True, text=True, check=True)
    assert said.stdout == "hello\n"
