"""The command line and the examples against the real services."""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.forked_program import ForkedProgram, run_octavo, start_octavo
from tests.support.held import children
from tests.support.processes import ROOT, free_port

INSTALLED = Path(sys.prefix) / "bin" / "octavo"
TINY = ROOT / "models" / "checkpoints" / "tiny"
GREEDY = ["--temperature", "0", "--max-tokens", "40"]


@pytest.fixture
def environment(services):
    """Variables with the services' addresses."""
    return os.environ | {
        "OCTAVO_FRONTEND": services.frontend.address,
        "OCTAVO_ENGINE": services.engine.address,
        "PYTHONPATH": str(ROOT),
    }


@pytest.fixture
def run(environment):
    """Starts a program."""

    def run_program(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run_program


@pytest.fixture
def ended(environment):
    """Runs the command line and returns how it ended."""

    def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return run_octavo(*arguments, environment=environment, given=stdin)

    return run


@pytest.fixture
def octavo(ended):
    """Runs the command line and returns its answer."""

    def run(*arguments: str, stdin: str = "") -> str:
        finished = ended(*arguments, stdin=stdin)
        assert finished.returncode == 0, finished.stderr
        return finished.stdout

    return run


def test_chat_and_generate_answer(octavo):
    assert octavo("chat", "What is 7 + 5?", *GREEDY).strip()
    assert octavo("generate", "Once upon a time", *GREEDY).strip()


def test_greedy_chat_through_standard_input_is_the_same_answer(octavo):
    once = octavo("chat", "What is 7 + 5?", *GREEDY)
    assert octavo("chat", *GREEDY, stdin="What is 7 + 5?\n") == once


def test_a_chat_through_standard_input_without_an_answer_is_exit_code_1(ended):
    finished = ended("chat", "--frontend", "127.0.0.1:1", stdin="hello\n")
    assert finished.returncode == 1
    assert "cannot connect" in finished.stderr


@pytest.mark.parametrize("flag", ["--port", "--http-port", "--metrics-port"])
def test_a_frontend_whose_port_is_taken_says_so_without_a_traceback(ended, flag):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ports = {"--port": "0", "--http-port": "0", flag: port}
        flags = [word for pair in ports.items() for word in pair]
        finished = ended("frontend", *flags, "--log-format", "json")
    assert finished.returncode == 1
    last = json.loads(finished.stderr.splitlines()[-1])
    assert last["event"] == "frontend_start_failed"
    assert "Address already in use" in last["error"]
    assert port in last["error"]
    assert "Traceback" not in finished.stderr


def test_a_shell_completes_commands(run):
    script = "_OCTAVO_COMPLETE=complete_bash COMP_WORDS='octavo pu' COMP_CWORD=1 exec \"$0\""
    assert run("bash", "-c", script, str(INSTALLED)).stdout.split() == ["pull"]


def test_ids_from_tokenize_are_what_generate_counts(octavo):
    ids = octavo("tokenize", "Once upon a time", "--ids").split()
    last = json.loads(octavo("generate", "Once upon a time", *GREEDY, "--json").splitlines()[-1])
    assert last["usage"]["prompt_tokens"] == len(ids)


def test_models_and_stats_describe_what_runs(octavo):
    assert "Qwen3ForCausalLM" in octavo("models")
    octavo("generate", "Once upon a time", *GREEDY)
    figures = json.loads(octavo("stats", "--once", "--json"))
    assert figures["ready"] is True
    assert figures["output_tokens"] > 0
    assert figures["num_blocks"] - figures["num_free_blocks"] <= 1  # the null block
    assert "KV blocks" in octavo("stats")


def test_health_of_both_services_is_exit_code_0(octavo, services):
    for service in (services.engine, services.frontend):
        health = ("health", service.address, "--timeout-s", "60")
        assert octavo(*health) == "serving\n"
        assert octavo(*health, "--service", "liveness") == "serving\n"


@pytest.mark.parametrize("target", ["frontend", "engine"])
def test_bench_serving_gets_every_token_that_it_asks_for(octavo, services, tmp_path, target):
    result = tmp_path / "result.json"
    past_frontend = ["--engine", services.engine.address] if target == "engine" else []
    load = "--num-requests 8 --concurrency 4 --prompt-tokens 8-16 --output-tokens 5"
    octavo("bench", "serving", *load.split(), *past_frontend, "--json", str(result))
    measured = json.loads(result.read_text())
    assert measured["num_served"] == 8
    assert measured["output_tokens"] == 40


def test_bench_serving_with_a_rate_sends_everything(octavo, tmp_path):
    result = tmp_path / "result.json"
    load = "--num-requests 10 --rate 50 --prompt-tokens 8 --output-tokens 3"
    octavo("bench", "serving", *load.split(), "--json", str(result))
    assert json.loads(result.read_text())["num_served"] == 10


def test_a_bad_sampling_value_is_one_line_and_exit_code_1(ended):
    finished = ended("generate", "hi", "--top-p", "7")
    assert finished.returncode == 1
    assert finished.stderr.startswith("octavo: ")
    assert "top_p" in finished.stderr


@pytest.mark.parametrize("service", ["engine", "frontend"])
def test_a_services_own_help_is_passed_through(ended, service):
    finished = ended(service, "--help")
    about = finished.stdout.partition("\n\n")[2].partition("options:")[0]
    assert not any(line.startswith(" ") for line in about.splitlines())
    assert finished.returncode == 0
    assert "--max-message-bytes" in finished.stdout


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_an_example_runs_as_its_text_says(run, example: Path):
    finished = run(sys.executable, str(example))
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.strip()


def test_an_example_without_our_client_uses_no_proxy_to_this_machine_either(run):
    absent = ("env", "http_proxy=http://127.0.0.1:1", "no_proxy=", "NO_PROXY=")
    finished = run(*absent, sys.executable, str(ROOT / "examples" / "raw_engine.py"))
    assert finished.returncode == 0, finished.stderr


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_an_example_has_help(run, example: Path):
    finished = run(sys.executable, str(example), "--help")
    assert finished.returncode == 0, finished.stderr
    assert "octavo serve" in finished.stdout


@contextlib.contextmanager
def serving(folder):
    """A running `octavo serve`, its frontend's address and what it writes."""
    log = folder / "serve.log"
    address = f"127.0.0.1:{free_port()}"
    command = [INSTALLED, "serve", "--port", address.rpartition(":")[2], "--engine-port", "0"]
    command += ["--http-port", "0", "--max-num-seqs", "4", str(TINY), "--swap-space", "4"]
    hostile = folder / "hostile"
    hostile.mkdir()
    for module in ("models", "protos", "services", "structlog", "torch", "uvloop"):
        (hostile / f"{module}.py").write_text("raise SystemExit('imported from here')")
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=hostile, stdout=output, stderr=output)
    try:
        yield process, address, log
    finally:
        process.terminate()
        process.wait(60)


@contextlib.contextmanager
def forked(folder, *flags):
    """`octavo serve` whose processes are forked, and what it writes."""
    log = folder / "serve.log"
    with log.open("wb") as output:
        process = start_octavo("serve", *flags, output=output.fileno())
    try:
        yield process, log
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """One for tests that leave it as it was, and for the one that kills it."""
    with serving(tmp_path_factory.mktemp("serve")) as running:
        yield running


class TestServe:
    """`octavo serve` as its user sees it."""

    @pytest.fixture
    def serve(self, tmp_path):
        with serving(tmp_path) as running:
            yield running

    def test_a_model_by_position_and_flags_of_an_engine_serve_http(self, shared):
        process, _, log = shared
        _wait_for(log, "over HTTP", process)
        assert "--swap-space has no effect" in log.read_text()
        [url] = re.findall(r"over HTTP: +(http://\S+)/v1", log.read_text())
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] <= 2

    def test_a_second_one_on_the_same_port_says_so_and_starts_nothing(self, shared):
        process, address, log = shared
        _wait_for(log, "talk to it", process)
        port = address.rpartition(":")[2]
        finished = run_octavo("serve", "--port", port, "--engine-port", "0")
        assert finished.returncode == 1
        assert finished.stderr.startswith(f"octavo: cannot listen on {address}: Address already")

    def test_a_killed_frontend_comes_back_on_its_port(self, shared):
        process, address, log = shared
        _wait_for(log, "talk to it", process)
        children = psutil.Process(process.pid).children()
        (frontend,) = [child for child in children if "services.frontend" in child.cmdline()]
        frontend.kill()
        _wait_for(log, r"(?s)starting it again.*frontend: ready", process)
        assert run_octavo("health", address, "--timeout-s", "60").returncode == 0

    def test_sigint_stops_both_services_and_exits_0(self, tmp_path):
        address = f"127.0.0.1:{free_port()}"
        ports = ("--port", address.rpartition(":")[2], "--engine-port", "0", "--no-http")
        with forked(tmp_path, *ports) as (process, log):
            _wait_for(log, "talk to it", process)
            finished = run_octavo("chat", "What is 7 + 5?", "--frontend", address, *GREEDY)
            assert finished.returncode == 0
            os.kill(process.pid, signal.SIGINT)
            assert process.wait(60) == 0
            assert log.read_text().rstrip().endswith("stopped")

    def test_its_sudden_death_as_it_starts_ends_every_process(self, serve):
        process, _, log = serve
        _wait_for(log, "engine: starting on", process)
        _assert_death_ends_all(process)

    def test_its_sudden_death_ends_every_process(self, shared):
        process, _, log = shared
        _wait_for(log, "talk to it", process)
        _assert_death_ends_all(process)

    @pytest.mark.parametrize(
        ("flags", "said"),
        [
            ("--max-samples 0", "the frontend's flags: --max-samples is '0': "),
            ("--frontend-arg=--tls-cert=absent.pem", "TLS needs both --tls-cert and --tls-key"),
            ("--api-keys-file absent.toml", "the frontend's flags: absent.toml cannot be read: "),
            ("--max-num-seqs 0 OWNER/NAME", "the engine's flags: --max-num-seqs is '0': "),
            ("--frontend-arg=--frobnicate", "unrecognized arguments: --frobnicate"),
            ("""--frontend-arg='"a'""", "No closing quotation"),
        ],
    )
    def test_what_a_service_would_refuse_is_said_before_one_starts(self, flags, said):
        finished = run_octavo("serve", "--port", "0", "--engine-port", "0", *shlex.split(flags))
        assert finished.returncode == 2
        assert said in finished.stderr
        assert "starting" not in finished.stderr
        assert "Traceback" not in finished.stderr

    def test_a_flag_that_the_engine_refuses_ends_it_with_the_engines_exit_code(self):
        ports = ("--port", "0", "--engine-port", "0")
        finished = run_octavo("serve", *ports, "--no-http", "/nowhere")
        assert finished.returncode == 2
        assert "octavo: engine exited with 2" in finished.stderr


def test_models_share_a_card_and_a_killed_engine_comes_back_asleep(tmp_path):
    other = tmp_path / "other"
    shutil.copytree(TINY, other)
    flags = [TINY, "--model", other, "--port", "0"]
    flags += ["--engine-port", "0", "--http-port", "0", "--num-kv-blocks", "64"]
    with forked(tmp_path, *flags) as (process, log):
        _wait_for(log, "over HTTP", process)
        said = log.read_text()
        assert "tiny, other share the card: one is awake, sleep is of level 1" in said
        assert re.search(r"engine-1: tiny loaded in .* asleep in", said)
        assert re.search(
            r"engine-2: other loaded in .* asleep in .*engine-1: tiny awake", said, re.S
        )
        assert re.search(r"octavo chat --frontend \S+ --model tiny", said)
        [url] = re.findall(r"over HTTP: +(http://\S+)/v1", said)
        [port] = re.findall(r"engine-1: starting on \S+:(\d+)", said)

        def ask(model):
            body = {"model": model, "prompt": "Hi", "max_tokens": 2}
            return httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code

        assert [ask("tiny"), ask("other"), ask("tiny")] == [200, 200, 200]
        [engine] = [each for each in children(process) if int(port) in _ports_of(each)]
        engine.kill()
        _wait_for(log, r"(?s)starting it again.*engine-1: asleep after", process)
        assert ask("other") == 200
        while ask("tiny") == 503:
            time.sleep(0.05)
        assert ask("tiny") == 200
        assert process.poll() is None


def test_a_model_that_cannot_be_loaded_ends_the_start_of_a_shared_card(tmp_path):
    bad = tmp_path / "bad"
    shutil.copytree(TINY, bad)
    for file in bad.glob("*.safetensors"):
        file.write_bytes(b"")
    ports = ("--port", "0", "--engine-port", "0", "--no-http")
    models = ("--model", TINY, "--model", bad)
    finished = run_octavo("serve", *ports, *models)
    assert finished.returncode == 1
    assert "octavo: engine-2 exited with 1" in finished.stderr
    assert "frontend: starting" not in finished.stderr


def _ports_of(process: psutil.Process) -> set[int]:
    """Returns the ports on which a process listens."""
    sockets = process.net_connections()
    return {each.laddr.port for each in sockets if each.status == psutil.CONN_LISTEN}


def _assert_death_ends_all(process: subprocess.Popen[bytes]) -> None:
    others = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    assert psutil.wait_procs(others, timeout=60)[1] == []


def _wait_for(log: Path, pattern: str, process: subprocess.Popen[bytes] | ForkedProgram) -> None:
    deadline = time.monotonic() + 120
    while not re.search(pattern, log.read_text()):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
