"""Each client in its default settings against both services, which start once."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from services.engine.config.checkpoint import TINY_CHECKPOINT
from tests.clients import table
from tests.clients.environments import PACKAGES, ROOT, NotInstallableError, python_of
from tests.clients.trial import Report
from tests.integration.test_tool_calls import TEMPLATE
from tests.support.processes import free_port, stack
from tests.support.strict_metrics import check_page

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1800)]

DRIVER_TIMEOUT_S = 300
SCHEMATHESIS_CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_schema_conformance,negative_data_rejection,unsupported_method,use_after_free"
)
REFUSALS = ["400", "404", "405", "413", "415"]
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    """The addresses with metrics; filled by `url`."""
    return {}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with a chat template that has tools."""
    folder = tmp_path_factory.mktemp("clients") / "tiny"
    shutil.copytree(TINY_CHECKPOINT, folder)
    config_path = folder / "tokenizer_config.json"
    config = json.loads(config_path.read_text())
    config_path.write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="module")
def url(model: Path, pages: dict[str, str]) -> Iterator[str]:
    port, of_engine, of_frontend = free_port(), free_port(), free_port()
    engine = {"model": model, "metrics_port": of_engine}
    frontend = {"http_port": port, "metrics_port": of_frontend}
    with stack(engine=engine, frontend=frontend):
        pages |= {
            "engine": f"http://127.0.0.1:{of_engine}/metrics",
            "frontend": f"http://127.0.0.1:{of_frontend}/metrics",
            "frontend, HTTP": f"http://127.0.0.1:{port}/metrics",
        }
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def reports() -> Iterator[list[Report]]:
    """The reports of a run; one of all clients becomes the page."""
    made: list[Report] = []
    yield made
    if len(made) == len(PACKAGES) + 2:
        table.write(made)


@pytest.fixture
def folder() -> Iterator[str]:
    """A folder with a short path: aiperf has sockets in it."""
    with tempfile.TemporaryDirectory() as path:
        yield path


@pytest.mark.parametrize("client", PACKAGES)
def test_a_client_works_in_its_default_settings(client, url, model, reports, folder):
    try:
        python = python_of(client)
    except NotInstallableError as error:
        reports.append(Report(client, "none", [("installing it", f"cannot be installed: {error}")]))
        pytest.skip(f"{client} cannot be installed here: {error}")
    result = subprocess.run(
        [python, "-m", f"tests.clients.drivers.{client}", f"{url}/v1", model.name],
        cwd=ROOT,
        env={
            "PATH": os.environ["PATH"],
            "HOME": folder,
            "TMPDIR": folder,
            "TOKENIZER": str(model),
        },
        capture_output=True,
        text=True,
        timeout=DRIVER_TIMEOUT_S,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    report = Report(**json.loads(result.stdout.strip().rpartition("\n")[2]))
    reports.append(report)
    assert report.trials
    failed = {what: error for what, error in report.trials if error is not None}
    assert not failed, result.stderr[-2000:]


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
