"""Both services, each started once, under messages that only an attacker sends.

No call may hang or end with INTERNAL, UNKNOWN, UNAVAILABLE or 5xx; nothing may crash, restart, leak
or log an error; and afterwards a sane request is answered as before. The messages depend on seeds
alone. Together the long rows send more than 100,000 messages.
"""

import os
import random
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from google.protobuf import message_factory
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.fuzz_calls import HELLO, Outcome
from tests.support.fuzz_target import ENGINE, FRONTEND, OPENENGINE, Target, fuzz_target
from tests.support.hostile_bodies import hostile_request
from tests.support.hostile_messages import any_message

NUM_THREADS = 16
MAX_BAD = 20
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_schema_conformance,negative_data_rejection,unsupported_method"
)
REFUSALS = ["400", "404", "405", "413", "415"]
"""How a wrong request may be refused; a list can be too long for the body's limit, too."""
METHODS = [
    (service, method.name)
    for service in (ENGINE, *OPENENGINE, FRONTEND)
    for method in service.methods
    if method.input_type.fields and method.name != "Drain"  # what it takes ends the engine
]


def short_and_long(name: str, short: int, long: int) -> pytest.MarkDecorator:
    """Parametrizes a test with how much it sends."""
    return pytest.mark.parametrize(name, [short, pytest.param(long, marks=pytest.mark.faults)])


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with fuzz_target() as running:
        yield running


@pytest.fixture(autouse=True)
def unharmed(target: Target) -> Iterator[None]:
    before = target.complaints()
    yield
    target.check_is_unharmed()
    assert target.complaints() == before


def in_threads(send: Callable[[random.Random], object], *, until: Callable[[], bool]) -> None:
    """Calls `send` in many threads at once, each with random numbers of its own."""

    def work(seed: int) -> None:
        rng = random.Random(seed)
        while not until():
            send(rng)

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        list(pool.map(work, range(NUM_THREADS)))


@pytest.mark.timeout(1200)
@short_and_long("num_messages", 2_000, 80_000)
def test_every_method_survives_random_and_damaged_messages(target, num_messages):
    outcome = Outcome()
    weights = [
        10 if each.descriptor in (ENGINE, *OPENENGINE, FRONTEND) else 1 for each in target.services
    ]

    def send(rng: random.Random) -> None:
        [service] = rng.choices(target.services, weights)
        service.call_any(rng, outcome)

    in_threads(
        send, until=lambda: outcome.num_messages >= num_messages or len(outcome.bad) > MAX_BAD
    )
    print(f"{outcome.num_messages} messages", dict(sorted(outcome.codes.items())))  # noqa: T201
    assert outcome.bad == []


@pytest.mark.timeout(1200)
@short_and_long("examples", 5, 1_000)
@pytest.mark.parametrize(
    ("service", "name"), METHODS, ids=lambda value: getattr(value, "name", value)
)
def test_every_method_survives_every_message_of_its_type(target, service, name, examples):
    method = service.methods_by_name[name]
    request_class = message_factory.GetMessageClass(method.input_type)
    outcome = Outcome()

    @settings(max_examples=examples, database=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(any_message(request_class), min_size=1, max_size=6))
    def send(messages) -> None:
        if not method.client_streaming:
            messages = messages[:1]
        elif service is ENGINE:
            messages = [HELLO, *messages]
        sent = [message.SerializeToString() for message in messages]
        target.service(service).call(name, sent, outcome)
        assert outcome.bad == []

    send()
    print(f"{outcome.num_messages} messages", dict(sorted(outcome.codes.items())))  # noqa: T201


@pytest.mark.timeout(1200)
@short_and_long("num_requests", 500, 15_000)
def test_http_survives_random_and_damaged_requests(target, num_requests):
    statuses: Counter[int] = Counter()
    bad: list[str] = []
    with httpx.Client(base_url=target.http_url, timeout=60) as client:

        def send(rng: random.Random) -> None:
            request = hostile_request(rng)
            answer = client.request(
                request.method,
                request.path,
                content=request.body,
                headers={"content-type": request.content_type},
            )
            statuses[answer.status_code] += 1
            if answer.status_code >= 500:
                bad.append(f"{answer.status_code} {answer.text} after {request}")

        in_threads(send, until=lambda: statuses.total() >= num_requests or len(bad) > MAX_BAD)
    print(f"{statuses.total()} requests", dict(sorted(statuses.items())))  # noqa: T201
    assert bad == []


@pytest.mark.timeout(1200)
@short_and_long("examples", 3, 200)
def test_http_keeps_what_its_openapi_document_says(target, examples, tmp_path):
    # The exhaustive phase takes a minute; a few random examples of each kind take seconds.
    phases = "fuzzing" if examples < 100 else "examples,coverage,fuzzing"
    config = tmp_path / "schemathesis.toml"
    config.write_text(f"checks.negative_data_rejection.expected-statuses = {REFUSALS}")
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "--no-color"),
        *("--config-file", str(config), "run"),
        f"{target.http_url}/openapi.json",
        *("--phases", phases, "--max-examples", str(examples), "--seed", "1"),
        # More workers meet a fault of CPython 3.11 in deep recursion ("AST constructor recursion").
        *("--workers", "1"),
        *("--checks", CHECKS, "--request-timeout", "60", "--warnings", "off"),
    ]
    result = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=1000,
        check=False,
    )
    print(result.stdout[-1500:])  # noqa: T201
    assert result.returncode == 0, result.stdout + result.stderr


@short_and_long("num_connections", 100, 5_000)
def test_ports_survive_what_is_no_protocol_at_all(target, num_connections):
    rng = random.Random(1)
    http_port = int(target.http_url.rpartition(":")[2])
    ports = (target.stack.engine.port, target.stack.frontend.port, http_port)
    openings = (b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/1.1\r\n", b"POST /v1/c")
    for _ in range(num_connections):
        with socket.create_connection(("127.0.0.1", rng.choice(ports)), timeout=60) as connection:
            connection.sendall(rng.choice(openings) + rng.randbytes(rng.randint(0, 200)))
