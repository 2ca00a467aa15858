"""docker-compose.yml and the Dockerfiles, run and read without Docker.

The stack test takes commands, environment and health checks from the compose file unchanged
and runs them as processes. Service names and fixed ports become loopback ports; nothing else is
changed, so the file cannot rot unseen.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from services.engine.config.engine_config import EngineConfig
from services.frontend.config import FrontendConfig
from tests.support.certificates import LOOPBACK, Authority
from tests.support.forked_program import ForkedProgram, run_octavo, start_service
from tests.support.processes import free_port

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
GPU = yaml.safe_load((ROOT / "deploy" / "docker-compose.gpu.yml").read_text())
OBSERVABILITY = yaml.safe_load((ROOT / "deploy/docker-compose.observability.yml").read_text())
TLS = yaml.safe_load((ROOT / "deploy" / "docker-compose.tls.yml").read_text())
SERVICES = COMPOSE["services"]
READY_TIMEOUT_S = 120


class Loopback:
    """Translates what the compose file says to processes on this machine."""

    def __init__(self, certificates: Path | None = None) -> None:
        self.ports = {port: free_port() for port in ("50050", "50051", "8000")}
        self._certificates = certificates

    def word(self, text: str) -> str:
        """Fills in variables' defaults and maps addresses."""
        text = re.sub(r"\$\{(\w+):-([^}]*)\}", lambda match: match[2], str(text))
        text = re.sub(r"^(engine|frontend)(?=:)|^0\.0\.0\.0$", "127.0.0.1", text)
        host, colon, port = text.rpartition(":")
        return f"{host}{colon}{self.ports.get(port, port)}"

    def environment(self, service: dict) -> dict[str, str]:
        environment = {k: self.word(v) for k, v in service.get("environment", {}).items()}
        for volume in service.get("volumes", []):
            source, target, _ = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", volume).split(":")
            folder = str((ROOT / source).resolve())
            environment = {k: folder if v == target else v for k, v in environment.items()}
        if self._certificates is not None:
            mounted = f"{self._certificates}/"
            environment = {k: v.replace("/certificates/", mounted) for k, v in environment.items()}
        return os.environ | environment

    def start(self, service: dict) -> ForkedProgram:
        words = map(self.word, service["command"])
        return start_service(*words, environment=self.environment(service))

    def is_healthy(self, service: dict) -> bool:
        marker, program, *arguments = service["healthcheck"]["test"]
        assert (marker, program) == ("CMD", "octavo")
        return self.run(service, arguments).returncode == 0

    def run(self, service: dict, words: list[str]) -> subprocess.CompletedProcess[str]:
        return run_octavo(*map(self.word, words), environment=self.environment(service))


@contextlib.contextmanager
def running(mapped: Loopback, services: dict) -> Iterator[Loopback]:
    """Long-running services, started in the order that the compose file asks for."""
    with contextlib.ExitStack() as processes:
        for name in ("engine", "frontend"):
            service = services[name]
            process = mapped.start(service)
            processes.callback(process.wait, timeout=30)
            processes.callback(process.terminate)
            deadline = time.monotonic() + READY_TIMEOUT_S
            while not mapped.is_healthy(service):
                assert process.poll() is None, f"{name} exited {process.returncode}"
                assert time.monotonic() < deadline, f"{name} did not become healthy"
        yield mapped


@pytest.fixture(scope="module")
def loopback() -> Iterator[Loopback]:
    """The services as docker-compose.yml has them."""
    with running(Loopback(), SERVICES) as mapped:
        yield mapped


def secured(name: str) -> dict:
    """A service as Compose merges it with the file that adds TLS."""
    plain, added = SERVICES[name], TLS["services"][name]
    return plain | {"environment": plain["environment"] | added["environment"]}


def test_with_tls_and_keys_only_the_client_gets_an_answer(tmp_path):
    authority = Authority(tmp_path)
    for name in ("engine", "frontend"):
        authority.issue(name, LOOPBACK, name)
    (tmp_path / "keys.toml").write_text('[keys.client]\nkey = "compose-0123456789"\n')
    (tmp_path / "api-key").write_text("compose-0123456789\n")
    services = {name: secured(name) for name in SERVICES}
    with running(Loopback(tmp_path), services) as mapped:
        answer = mapped.run(secured("client"), SERVICES["client"]["command"])
        assert answer.returncode == 0, answer.stderr
        keyless = dict(secured("client")["environment"])
        del keyless["OCTAVO_API_KEY_FILE"]
        refused = mapped.run({"environment": keyless}, SERVICES["client"]["command"])
        assert "API key" in refused.stderr
        assert not mapped.is_healthy(SERVICES["engine"])  # without a certificate


def test_the_file_that_adds_tls_mounts_its_folder_read_only_everywhere():
    assert list(TLS["services"]) == list(SERVICES)
    for service in TLS["services"].values():
        assert service["volumes"] == ["${OCTAVO_CERTIFICATES:-./certificates}:/certificates:ro"]


def test_the_client_profiles_own_command_gets_an_answer(loopback):
    client = SERVICES["client"]
    answer = loopback.run(client, client["command"])
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip()
    assert "finish reason" in answer.stderr


def test_the_served_model_has_the_name_that_compose_gives_it(loopback):
    models = loopback.run(SERVICES["client"], ["models"])
    assert "tiny" in models.stdout


def test_the_published_http_api_answers_and_its_health_is_checked(loopback):
    url = f"http://127.0.0.1:{loopback.ports['8000']}"
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.json()["model"] == "tiny"
    words = SERVICES["frontend"]["healthcheck"]["test"]
    elsewhere = ["1" if word == "8000" else word for word in words[2:]]
    refused = loopback.run(SERVICES["frontend"], elsewhere)
    assert refused.returncode == 1
    assert "HTTP at 127.0.0.1:1 does not answer" in refused.stderr


def test_health_reports_a_service_that_is_away():
    assert not Loopback().is_healthy(SERVICES["engine"])


@pytest.mark.parametrize(
    "file",
    [
        "docker-compose.yml",
        "deploy/docker-compose.gpu.yml",
        "deploy/docker-compose.tls.yml",
    ],
)
def test_the_file_is_valid_compose(file):
    tool = Path(sys.executable).parent / "check-jsonschema"
    command = [tool, "--builtin-schema", "vendor.compose-spec", ROOT / file]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_only_the_frontend_is_published_and_only_to_this_machine():
    ports = {name: service.get("ports", []) for name, service in SERVICES.items()}
    published = ["127.0.0.1:50050:50050", "127.0.0.1:8000:8000"]
    assert ports == {"engine": [], "frontend": published, "client": []}


@pytest.mark.parametrize("name", list(SERVICES))
def test_every_container_is_read_only_and_without_privileges(name):
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["pids_limit"] > 0
    assert service["tmpfs"] == ["/tmp:size=1g,mode=1777"]
    assert "user" not in service, "the image's own user is nobody special"
    assert "privileged" not in service


def test_only_the_engines_caches_can_be_written_and_only_by_the_images_user():
    mounts = [
        volume.rsplit(":", 2) for each in SERVICES.values() for volume in each.get("volumes", ())
    ]
    assert [target for _, target, mode in mounts if mode != "ro"] == ["/home/octavo/.cache"]
    assert "install -d -o octavo -g octavo /home/octavo/.cache" in _dockerfile("engine")
    for path in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        cache = GPU["services"]["engine"]["environment"][path]
        assert cache.startswith("/home/octavo/.cache/")


def test_the_engine_has_no_way_out_and_meets_the_others_on_a_network_of_its_own():
    assert COMPOSE["networks"]["engines"] == {"internal": True}
    assert SERVICES["engine"]["networks"] == ["engines"]
    assert SERVICES["frontend"]["networks"] == ["engines", "clients"]


@pytest.mark.parametrize("name", ["engine", "frontend"])
def test_an_image_by_itself_has_the_health_check_that_compose_has(name):
    [check] = re.findall(r"^HEALTHCHECK .*\\\n +CMD (.+)$", _dockerfile(name), re.MULTILINE)
    assert ["CMD", *json.loads(check)] == SERVICES[name]["healthcheck"]["test"]


def test_services_start_when_the_one_before_is_healthy():
    assert SERVICES["frontend"]["depends_on"] == {"engine": {"condition": "service_healthy"}}
    assert SERVICES["client"]["depends_on"] == {"frontend": {"condition": "service_healthy"}}
    assert all("healthcheck" in SERVICES[name] for name in ("engine", "frontend"))


def test_containers_get_longer_to_stop_than_the_services_take_to_drain():
    for name in ("engine", "frontend"):
        assert int(SERVICES[name]["stop_grace_period"].removesuffix("s")) > 30


def test_the_gpu_override_builds_the_engine_for_it():
    argument = next(iter(GPU["services"]["engine"]["build"]["args"]))
    assert f"ARG {argument}" in _dockerfile("engine")


def test_each_engine_has_a_gpu_of_its_own_and_the_frontend_finds_it():
    taken = []
    for name, service in GPU["services"].items():
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
        taken += device["device_ids"]
        # Compose refuses to scale a service whose container has a name.
        assert service["container_name"] == f"octavo-{name}"
    assert taken == ["0", "1"]
    engines = SERVICES["frontend"]["environment"]["OCTAVO_FRONTEND_ENGINE_ADDRESS"]
    second = GPU["services"]["engine-1"]
    assert engines.partition(":")[0] in second["networks"]["engines"]["aliases"]
    extended = second["extends"]
    assert yaml.safe_load((ROOT / "deploy" / extended["file"]).read_text()) == COMPOSE
    assert extended["service"] == "engine"


def test_the_observability_override_scrapes_what_it_switches_on():
    services = OBSERVABILITY["services"]
    prometheus = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())
    scraped = {
        t for job in prometheus["scrape_configs"] for t in job["static_configs"][0]["targets"]
    }
    for name, make in (("engine", EngineConfig.from_flags), ("frontend", FrontendConfig)):
        prefix = f"OCTAVO_{name.upper()}_"
        given = services[name]["environment"]
        config = make(**{key.removeprefix(prefix).lower(): value for key, value in given.items()})
        metrics_port = getattr(config, "observability", config).metrics_port
        assert f"{name}:{metrics_port}" in scraped
    for service in services.values():
        for volume in service.get("volumes", []):
            assert (ROOT / volume.partition(":")[0]).exists(), volume


@pytest.mark.parametrize("name", ["engine", "frontend"])
def test_a_dockerfile_copies_only_what_is_there_and_what_the_builder_gets(name):
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line[0] == "!"}
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", _dockerfile(name), re.MULTILINE)
    for source in " ".join(copied).split():
        assert (ROOT / source).exists(), source
        assert source.split("/")[0] in sent, source


@pytest.mark.parametrize("name", ["engine", "frontend"])
def test_a_dockerfile_runs_what_compose_runs_without_privileges(name):
    dockerfile = _dockerfile(name)
    assert json.loads(re.findall(r"^ENTRYPOINT (.+)$", dockerfile, re.MULTILINE)[-1]) == ["octavo"]
    default = json.loads(re.findall(r"^CMD (.+)$", dockerfile, re.MULTILINE)[-1])
    assert default == SERVICES[name]["command"]
    assert re.findall(r"^USER (.+)$", dockerfile, re.MULTILINE)[-1] == "10001"
    assert SERVICES[name]["build"]["dockerfile"] == f"deploy/{name}.Dockerfile"


def test_the_frontend_image_installs_no_torch():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r'"\.\[(.+)\]"', _dockerfile("frontend"))
    wanted = list(project["dependencies"])
    for extra in extras.split(","):
        wanted += project["optional-dependencies"][extra]
    assert [name for name in wanted if re.match("torch|triton|safetensors", name)] == []
    assert "torch" not in _dockerfile("frontend").replace("No torch", "")


def _dockerfile(name: str) -> str:
    return (ROOT / "deploy" / f"{name}.Dockerfile").read_text()


def test_the_engine_can_be_scaled_and_the_frontend_finds_all_by_one_name():
    assert not SERVICES["engine"].keys() & {"container_name", "ports"}
    address = SERVICES["frontend"]["environment"]["OCTAVO_FRONTEND_ENGINE_ADDRESS"]
    assert address == "engine:50051"
