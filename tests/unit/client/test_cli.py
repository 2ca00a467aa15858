"""The command line against a frontend that echoes, and its messages for people."""

import http.server
import io
import json
import subprocess
import sys
import threading
import tomllib

import pytest

from services.client.cli import main
from services.client.commands import stats
from tests.support.fake_frontend import fake_frontend_in_thread
from tests.support.processes import ROOT, free_port

COMMANDS = [
    *("chat", "generate", "tokenize", "models", "serve", "demo", "stats", "graphs", "health"),
    *("embed", "rerank", "record"),
]


@pytest.fixture(scope="module")
def frontend():
    with fake_frontend_in_thread() as fake:
        yield fake


@pytest.fixture
def octavo(frontend, monkeypatch, capsys):
    """Runs a command line and returns its exit code, output and error output."""
    monkeypatch.setenv("OCTAVO_FRONTEND", frontend.address)
    monkeypatch.setattr(stats, "CALL_TIMEOUT_S", 60)

    def run(*arguments: str, stdin: str = ""):
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as exited:
            main(arguments)
        captured = capsys.readouterr()
        return exited.value.code or 0, captured.out, captured.err

    return run


@pytest.mark.parametrize("command", [*COMMANDS, "bench serving", "cache explain", "graphs plan"])
def test_help_of_every_command_explains_itself(octavo, command):
    code, out, _ = octavo(*command.split(), "--help")
    assert code == 0
    assert "Usage:" in out
    assert "Example" in out or command == "models"


def test_the_version_is_that_of_the_distribution(octavo):
    code, out, _ = octavo("--version")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (code, out) == (0, f"octavo {project['version']}\n")


def test_help_lists_every_command(octavo):
    _, out, _ = octavo("--help")
    names = [*COMMANDS, "engine", "frontend", "bench", "cache", "replay", "worker-node"]
    assert [name for name in names if name not in out] == []


def test_generate_writes_the_text_and_its_cost_on_standard_error(octavo):
    code, out, err = octavo("generate", "one two three", "--max-tokens", "2")
    assert (code, out) == (0, "one two\n")
    assert "3 prompt tokens (1 cached), 2 output tokens, finish reason length" in err


def test_generate_reads_standard_input(octavo):
    _, out, _ = octavo("generate", stdin="from a pipe")
    assert out == "from a pipe\n"


def test_generate_passes_every_flag_that_is_given_and_no_other(octavo, frontend):
    flags = "--temperature 0 --top-k 5 --stop x --stop y --no-ignore-eos --seed 7 --priority 2"
    octavo("generate", "a", *flags.split(), "--stop-token-ids", "9")
    sent = frontend.options[-1]
    fields = {field.name: value for field, value in sent.sampling.ListFields()}
    assert fields == {
        "temperature": 0, "top_k": 5, "ignore_eos": False, "seed": 7, "stop_token_ids": [9],
    }  # fmt: skip
    assert list(sent.stop) == ["x", "y"]
    assert sent.priority == 2


def test_generate_json_is_one_object_per_chunk(octavo):
    _, out, _ = octavo("generate", "one two", "--json", "--logprobs", "1")
    chunks = [json.loads(line) for line in out.splitlines()]
    assert [chunk["token_ids"] for chunk in chunks] == [[3], [3], []]
    assert chunks[0]["logprobs"][0]["chosen"]["logprob"] == -0.5
    assert chunks[-1]["finish_reason"] == "stop"


def test_chat_with_a_message_answers_once(octavo, frontend):
    code, out, _ = octavo("chat", "hello", "--system", "be kind")
    assert (code, out) == (0, "hello\n")
    assert frontend.conversations[-1] == [("system", "be kind"), ("user", "hello")]


def test_images_come_before_the_text_of_a_message(octavo, frontend, tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / name).write_bytes(name.encode())
    flags = ("--image", str(tmp_path / "cat"), "--image", str(tmp_path / "dog"))
    code, out, _ = octavo("chat", "hello", *flags)
    assert (code, out) == (0, "hello\n")
    [message] = frontend.chats[-1].messages
    assert [part.image or part.text for part in message.parts] == [b"cat", b"dog", "hello"]
    assert not message.content


def test_an_image_is_part_of_the_next_message_alone(octavo, frontend, tmp_path):
    path = tmp_path / "cat"
    path.write_bytes(b"cat")
    code, out, err = octavo("chat", stdin=f"/image {path}\nhello\nthere\n/image none\n")
    assert (code, out) == (1, "hello\nthere\n")
    first, _, second = frontend.chats[-1].messages
    assert [part.image or part.text for part in first.parts] == [b"cat", "hello"]
    assert (second.content, len(second.parts)) == ("there", 0)
    assert "none cannot be read" in err


@pytest.mark.parametrize("content", [None, b""])
def test_an_image_that_cannot_be_read_is_one_line(octavo, tmp_path, content):
    path = tmp_path / "cat"
    if content is not None:
        path.write_bytes(content)
    code, _, err = octavo("chat", "hello", "--image", str(path))
    assert code == 2
    err = " ".join(err.replace("│", "").split())  # lines break where the path makes them
    assert "cannot be read" in err or "is empty" in err


def test_a_conversation_keeps_its_history_until_it_is_reset(octavo, frontend):
    frontend.conversations.clear()
    lines = ["one", "two", "/system be brief", "/reset", "three", "/quit", "never asked"]
    code, out, _ = octavo("chat", stdin="\n".join(lines))
    assert (code, out) == (0, "one\ntwo\nthree\n")
    assert frontend.conversations == [
        [("user", "one")],
        [("user", "one"), ("assistant", "one"), ("user", "two")],
        [("system", "be brief"), ("user", "three")],
    ]


def test_a_failed_turn_is_taken_back_and_the_conversation_goes_on(octavo, frontend):
    frontend.conversations.clear()
    code, out, err = octavo("chat", stdin="FAIL\nfine\n")
    assert code == 1
    assert out == "fine\n"
    assert "the queue is full" in err
    assert frontend.conversations[-1] == [("user", "fine")]


def test_an_unknown_slash_command_shows_the_known_ones(octavo):
    _, out, err = octavo("chat", stdin="/help\n")
    assert out == ""
    assert "/reset" in err


def test_ctrl_c_at_the_prompt_gives_a_new_prompt(octavo, monkeypatch):
    typed = iter([KeyboardInterrupt(), "still here", EOFError()])

    def type_next(prompt: str) -> str:
        item = next(typed)
        if isinstance(item, BaseException):
            raise item
        return item

    monkeypatch.setattr("builtins.input", type_next)
    code, out, _ = octavo("chat")
    assert (code, out) == (0, "still here\n")


def test_embed_prints_the_vector_of_each_text(octavo, frontend):
    code, out, err = octavo("embed", "a", "b c", "--prompt-name", "query", "--truncate-tokens", "9")
    lines = [json.loads(line) for line in out.splitlines()]
    assert lines == [{"index": 0, "embedding": [1, -0.5]}, {"index": 1, "embedding": [2, -0.5]}]
    assert (code, err) == (0, "3 tokens\n")
    sent = frontend.vector_requests[-1]
    assert (sent.prompt_name, sent.options.truncate_tokens) == ("query", 9)
    assert not sent.HasField("dimensions")


def test_embed_reads_any_number_of_lines(octavo, frontend):
    frontend.vector_requests.clear()
    _, out, err = octavo("embed", "--dimensions", "1", stdin="one two\n\n" * 300)
    lines = [json.loads(line) for line in out.splitlines()]
    assert lines == [{"index": index, "embedding": [2]} for index in range(300)]
    assert [len(each.inputs) for each in frontend.vector_requests] == [256, 44]
    assert err == "600 tokens\n"


def test_rerank_prints_the_best_documents_first(octavo, frontend):
    flags = ("--top-n", "2", "--instruction", "shortest")
    _, out, err = octavo("rerank", "q", *flags, stdin="one\none two three\nè ù\n")
    assert [json.loads(line) for line in out.splitlines()] == [
        {"index": 1, "score": 3, "document": "one two three"},
        {"index": 2, "score": 2, "document": "è ù"},
    ]
    assert err == "6 tokens\n"
    sent = frontend.vector_requests[-1]
    assert (list(sent.queries), sent.instruction) == (["q"], "shortest")


@pytest.mark.parametrize("arguments", [("embed",), ("rerank", "q")])
def test_vectors_of_no_text_are_refused(octavo, arguments):
    code, _, err = octavo(*arguments)
    assert code == 2
    assert "there is no text" in err


def test_tokenize_shows_ids_and_tokens(octavo):
    _, out, _ = octavo("tokenize", "one [bold]three")
    assert "'one'" in out
    assert "' [bold]three'" in out


def test_tokenize_ids_is_one_line_for_scripts(octavo):
    _, out, _ = octavo("tokenize", "--chat", "--ids", "hi")
    assert out == "4 2\n"


def test_models_lists_what_is_served(octavo):
    _, out, _ = octavo("models")
    assert "echo" in out
    assert "EchoForCausalLM" in out


def test_bench_serving_reports_latencies_as_table_and_json(octavo, tmp_path):
    result = tmp_path / "result.json"
    load = "--num-requests 5 --concurrency 2 --prompt-tokens 4 --output-tokens 3"
    code, out, _ = octavo("bench", "serving", *load.split(), "--json", str(result))
    assert code == 0
    assert "5 served, 0 failed" in out
    measured = json.loads(result.read_text())
    assert measured["output_tokens"] == 15
    assert measured["load"]["concurrency"] == 2
    assert 0 < measured["ttft_ms"]["p50"] <= measured["e2e_ms"]["p99"]


@pytest.mark.parametrize("flags", [["--rate", "0"], ["--prompt-tokens", "9-3"]])
def test_a_load_that_makes_no_sense_is_a_usage_error(octavo, flags):
    code, _, err = octavo("bench", "serving", *flags)
    assert code == 2
    assert "Invalid value" in err


def test_a_result_file_without_a_folder_is_refused_before_the_load(octavo, frontend, tmp_path):
    frontend.options.clear()
    code, _, err = octavo("bench", "serving", "--json", str(tmp_path / "missing" / "run.json"))
    assert code == 2
    assert "no folder" in err
    assert not frontend.options


@pytest.mark.parametrize("flag", ["--top-k", "--max-tokens", "--seed"])
def test_a_number_that_its_field_cannot_hold_is_one_line(octavo, flag):
    code, _, err = octavo("generate", "hi", flag, "-1")
    name = flag.removeprefix("--").replace("-", "_")
    assert (code, err) == (1, f"octavo: {name} is -1, which its field cannot hold\n")


def test_a_priority_that_its_field_cannot_hold_is_one_line(octavo):
    code, _, err = octavo("generate", "hi", "--priority", "9999999999")
    assert code == 1
    assert err.startswith("octavo: priority is 9999999999")


@pytest.mark.parametrize("command", [("chat", "hi", "--frontend"), ("stats", "--engine")])
def test_a_url_is_no_address_of_grpc(octavo, command):
    code, _, err = octavo(*command, "http://127.0.0.1:8000")
    assert code == 2
    assert "is a URL; gRPC's address is host:port" in " ".join(err.replace("│", " ").split())


def test_the_frontends_address_taken_for_the_engines_is_explained(octavo, frontend):
    code, _, err = octavo("stats", "--engine", frontend.address)
    assert code == 1
    assert "--engine the engine's" in err


def test_a_refusal_is_one_line_and_exit_code_1(octavo):
    code, _, err = octavo("generate", "FAIL")
    assert (code, err) == (1, "octavo: the queue is full\n")


@pytest.mark.parametrize(
    "command", [["models"], ["stats"], ["health", "ADDRESS", "--timeout-s=60"]]
)
def test_a_service_that_is_away_is_one_line_with_a_hint(octavo, monkeypatch, command):
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("OCTAVO_FRONTEND", address)
    monkeypatch.setenv("OCTAVO_ENGINE", address)
    code, _, err = octavo(*[address if word == "ADDRESS" else word for word in command])
    assert code == 1
    assert len(err.splitlines()) == 1
    assert f"cannot connect to {address}: Connection refused" in err
    assert "`octavo serve` starts both services" in err


def test_the_port_of_http_taken_for_that_of_grpc_is_explained(octavo, monkeypatch):
    handler = http.server.BaseHTTPRequestHandler
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        monkeypatch.setenv("OCTAVO_FRONTEND", f"127.0.0.1:{web.server_port}")
        code, _, err = octavo("models")
        web.shutdown()
    assert code == 1
    assert f"127.0.0.1:{web.server_port} does not answer in gRPC (`octavo serve` shows" in err


def test_an_unknown_flag_is_a_usage_error(octavo):
    code, _, _ = octavo("generate", "hi", "--temprature", "1")
    assert code == 2


TOOLS = """[{"type": "function", "function": {"name": "get_weather", "description": "The weather.",
"parameters": {"type": "object", "properties": {"city": {"type": "string"}}}, "strict": true}}]"""


def test_chat_sends_tools_and_rules_and_shows_reasoning_and_calls(octavo, frontend, tmp_path):
    path = tmp_path / "tools.json"
    path.write_text(TOOLS)
    code, out, err = octavo(
        "chat", "CALL get_weather", "--tools", str(path), "--tool-choice", "get_weather",
        "--no-parallel-tool-calls", "--reasoning-effort", "low", "--max-reasoning-tokens", "7",
        "--template-variables", '{"enable_thinking": true}',
    )  # fmt: skip
    assert code == 0
    assert out == 'Wait.\nget_weather {"at": 0}\nget_weather {"at": 1}\n'
    assert err.startswith("It needs a tool.\n")
    assert "9 output tokens (2 of reasoning)" in err
    request = frontend.chats[-1]
    [tool] = request.tools
    assert (tool.name, tool.description, tool.strict) == ("get_weather", "The weather.", True)
    assert json.loads(tool.parameters)["properties"] == {"city": {"type": "string"}}
    assert request.required_tool == "get_weather"
    assert request.HasField("parallel_tool_calls")
    assert not request.parallel_tool_calls
    assert request.max_reasoning_tokens == 7
    variables = json.loads(request.template_variables)
    assert variables == {"enable_thinking": True, "reasoning_effort": "low"}


def test_chat_asks_for_the_results_of_calls(octavo, frontend):
    code, out, _ = octavo("chat", stdin="CALL f\nsunny\nrainy day\n")
    assert code == 0
    assert out.endswith("rainy day\n")
    asked = frontend.chats[-1].messages
    assert [message.role for message in asked] == ["user", "assistant", "tool", "tool"]
    assert [call.id for call in asked[1].tool_calls] == ["call_0", "call_1"]
    assert [(each.tool_call_id, each.content) for each in asked[2:]] == [
        ("call_0", "sunny"),
        ("call_1", "rainy day"),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("{}", "is not a list of tools"),
        ("[{}]", "entry 0"),
        ('[{"function": {"name": "f", "more": 1}}]', "'more'"),
    ],
)
def test_a_wrong_file_of_tools_is_refused(octavo, frontend, tmp_path, text, said):
    path = tmp_path / "tools.json"
    path.write_text(text)
    code, _, err = octavo("chat", "hi", "--tools", str(path))
    assert code == 2
    assert said in " ".join(err.replace("│", " ").split())


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (["--template-variables", "[]"], 2),
        (["--template-variables", '{"reasoning_effort": "low"}', "--reasoning-effort", "high"], 1),
        (["--max-reasoning-tokens", "-1"], 1),
    ],
)
def test_chat_refuses_wrong_rules(octavo, frontend, flags, code):
    assert octavo("chat", "hi", *flags)[0] == code


SLOW_IMPORTS = """
import sys
import services.client.cli
imported = {"numpy", "torch"} & sys.modules.keys()
assert not imported, imported
"""


def test_no_command_waits_for_the_import_of_numpy_or_torch():
    subprocess.run([sys.executable, "-c", SLOW_IMPORTS], cwd=ROOT, check=True, timeout=60)
