"""Each client in its default settings against both services, which start once."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from services.engine.config.checkpoint import TINY_CHECKPOINT
from tests.clients import open_responses, smg, table
from tests.clients.environments import CLIENTS, DRIVER_TIMEOUT_S, NotInstallableError, driver_of
from tests.clients.trial import Report
from tests.clients.vector_services import vector_services
from tests.support.processes import Stack, free_port, stack
from tests.support.smg_gateway import missing_part
from tests.support.strict_metrics import check_page

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1800)]

MODEL = TINY_CHECKPOINT.name
SCHEMATHESIS_CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_schema_conformance,negative_data_rejection,unsupported_method,use_after_free"
)
REFUSALS = ["400", "404", "405", "413", "415"]
NUM_OTHERS = 4
"""Reports that are not of a client with an environment of its own."""
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    """The addresses with metrics; filled by `url`."""
    return {}


@pytest.fixture(scope="module")
def services(pages: dict[str, str]) -> Iterator[tuple[Stack, str]]:
    """Both services with the embedded model, and the URL of the frontend."""
    port, of_engine, of_frontend = free_port(), free_port(), free_port()
    engine = {"metrics_port": of_engine, "vllm_grpc": True}
    frontend = {"http_port": port, "metrics_port": of_frontend}
    with stack(engine=engine, frontend=frontend) as both:
        pages |= {
            "engine": f"http://127.0.0.1:{of_engine}/metrics",
            "frontend": f"http://127.0.0.1:{of_frontend}/metrics",
            "frontend, HTTP": f"http://127.0.0.1:{port}/metrics",
        }
        yield both, f"http://127.0.0.1:{port}"


@pytest.fixture
def url(services: tuple[Stack, str]) -> str:
    return services[1]


@pytest.fixture(scope="module")
def vector_urls() -> Iterator[dict[str, str]]:
    """Variables with the URLs of services that answer with vectors and scores."""
    with vector_services() as urls:
        yield urls


@pytest.fixture(scope="module")
def reports() -> Iterator[list[Report]]:
    """The reports of a run; one of all clients becomes the page."""
    made: list[Report] = []
    yield made
    if len(made) == len(CLIENTS) + NUM_OTHERS:
        table.write(made)


@pytest.fixture
def folder() -> Iterator[str]:
    """A folder with a short path: aiperf has sockets in it."""
    with tempfile.TemporaryDirectory() as path:
        yield path


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_works_in_its_default_settings(client, url, vector_urls, reports, folder):
    try:
        driver = driver_of(client)
    except NotInstallableError as error:
        reports.append(Report(client, "none", [("installing it", f"cannot be installed: {error}")]))
        pytest.skip(f"{client} cannot be installed here: {error}")
    variables = vector_urls | {"TOKENIZER": str(TINY_CHECKPOINT)}
    report = driver.report(url, MODEL, Path(folder), **variables)
    reports.append(report)
    assert report.trials
    failed = {what: error for what, error in report.trials if error is not None}
    assert not failed


def test_a_foreign_gateway_calls_tools(services, reports):
    report = Report("smg")
    reports.append(report)
    if missing_part():
        report.trials.append(("installing it", missing_part()))
        pytest.skip(missing_part())
    smg.try_gateway(report, services[0].engine.address, MODEL)
    assert not [each for each in report.trials if each[1] is not None], report


def test_the_cases_of_open_responses(url, reports):
    report = Report("cases of Open Responses")
    reports.append(report)
    open_responses.try_cases(report, url, MODEL)
    assert not [each for each in report.trials if each[1] is not None], report


def test_every_page_of_metrics_is_read_strictly(url, pages, reports):
    del url
    report = Report("promtool's rules, and prometheus_client's parser of OpenMetrics", "")
    reports.append(report)
    for name, page in pages.items():
        for accept in ("text/plain", OPENMETRICS):
            with report.trial(f"/metrics of the {name}, {accept.partition(';')[0]}"):
                response = httpx.get(page, headers={"accept": accept}, timeout=60)
                check_page(response.text, response.headers["content-type"])
    assert not [error for _, error in report.trials if error is not None], report


def test_the_served_openapi_document_says_what_is_done(url, reports, tmp_path):
    (tmp_path / "schemathesis.toml").write_text(
        f"checks.negative_data_rejection.expected-statuses = {REFUSALS}"
    )
    result = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "--no-color", "run"),
            *(f"{url}/openapi.json", "--phases", "fuzzing", "--max-examples", "30", "--seed", "1"),
            *("--checks", SCHEMATHESIS_CHECKS, "--request-timeout", "60", "--warnings", "off"),
        ],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=DRIVER_TIMEOUT_S,
        check=False,
    )
    report = Report("schemathesis")
    with report.trial("30 requests of each kind that /openapi.json describes"):
        assert result.returncode == 0, result.stdout[-4000:]
    report.version = result.stdout.partition("v")[2].split()[0]
    reports.append(report)
    assert result.returncode == 0, result.stdout + result.stderr
