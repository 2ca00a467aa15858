"""The manifests of deploy/kubernetes, run and read without a cluster.

The stack test takes arguments, ConfigMaps, probes and hooks from the manifests unchanged and runs
them as processes. Service names and fixed ports become loopback ports, mounted folders become
folders of the test; nothing else is changed but the GPU, so the files cannot rot unseen.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from services.engine.config.engine_config import EngineConfig
from services.frontend.config import FrontendConfig
from tests.support.certificates import LOOPBACK, Authority
from tests.support.forked_program import run_octavo, start_service
from tests.support.processes import free_port

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
FILES = [FOLDER / name for name in KUSTOMIZATION["resources"]]
OBJECTS = {
    (each["kind"], each["metadata"]["name"]): each
    for file in FILES
    for each in yaml.safe_load_all(file.read_text())
}
WORKLOADS = {"engine": "StatefulSet", "frontend": "Deployment"}
NAMES = list(WORKLOADS)
READY_TIMEOUT_S = 120
KEY = "kubernetes-0123456789"
OCTAVO = [sys.executable, "-m", "services.client.cli"]
"""The command that the images' entry point, `octavo`, runs."""


def workload(name: str) -> dict:
    return OBJECTS[WORKLOADS[name], f"octavo-{name}"]["spec"]


def pod(name: str) -> dict:
    return workload(name)["template"]["spec"]


def container(name: str) -> dict:
    (only,) = pod(name)["containers"]
    return only


def variables(name: str) -> dict[str, str]:
    (source,) = container(name)["envFrom"]
    return OBJECTS["ConfigMap", source["configMapRef"]["name"]]["data"]


def service_config(name: str) -> EngineConfig | FrontendConfig:
    prefix = f"OCTAVO_{name.upper()}_"
    given = {
        key.removeprefix(prefix).lower(): value
        for key, value in variables(name).items()
        if key.startswith(prefix)
    }
    make = EngineConfig.from_flags if name == "engine" else FrontendConfig
    return make(**given)


def labels(name: str) -> dict[str, str]:
    return workload(name)["template"]["metadata"]["labels"]


class Cluster:
    """Translates what the manifests say to processes on this machine.

    Args:
        mounts: for each workload, the folder that stands for each of its mount paths.
    """

    def __init__(self, mounts: dict[str, dict[str, Path]]) -> None:
        self._mounts = mounts
        self.ports = {port: free_port() for port in ("50050", "50051", "8000")}

    def word(self, text: str) -> str:
        if text in ("0.0.0.0", *self.ports):
            return {"0.0.0.0": "127.0.0.1"}.get(text) or str(self.ports[text])
        _, colon, port = text.rpartition(":")
        return f"127.0.0.1:{self.ports[port]}" if colon and port in self.ports else text

    def environment(self, name: str) -> dict[str, str]:
        given = {key: self.word(value) for key, value in variables(name).items()}
        for path, folder in self._mounts[name].items():
            for key, value in given.items():
                if value == path or value.startswith(f"{path}/"):
                    given[key] = f"{folder}{value.removeprefix(path)}"
        if name == "engine":
            given["OCTAVO_ENGINE_DEVICE"] = "cpu"
        return os.environ | given

    def probe(self, name: str, kind: str) -> subprocess.CompletedProcess[str]:
        program, *arguments = container(name)[kind]["exec"]["command"]
        assert program == "octavo"
        return self.run(arguments, self.environment(name))

    def run(
        self, words: list[str], environment: dict[str, str]
    ) -> subprocess.CompletedProcess[str]:
        return run_octavo(*map(self.word, words), environment=environment)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    """The services as the manifests have them, with TLS on both hops and API keys."""
    folder = tmp_path_factory.mktemp("cluster")
    authority = Authority(folder)
    (folder / "keys.toml").write_text(f'[keys.client]\nkey = "{KEY}"\n')
    mounts: dict[str, dict[str, Path]] = {}
    for name in NAMES:
        authority.issue(name, LOOPBACK, f"octavo-{name}")
        tls = folder / f"octavo-{name}-tls"
        tls.mkdir()
        for source, target in ((f"{name}.pem", "tls.crt"), (f"{name}.key", "tls.key")):
            shutil.copy(folder / source, tls / target)
        shutil.copy(folder / "ca.pem", tls / "ca.crt")
        mounts[name] = {"/tls": tls}
    mounts["engine"]["/model"] = ROOT / "models/checkpoints/tiny"
    mounts["engine"]["/home/octavo/.cache"] = folder / "cache"
    mounts["frontend"]["/keys"] = folder
    running = Cluster(mounts)
    with contextlib.ExitStack() as processes:
        for name in NAMES:
            words = map(running.word, container(name)["args"])
            process = start_service(*words, environment=running.environment(name))
            processes.callback(process.wait, timeout=30)
            processes.callback(process.terminate)
            deadline = time.monotonic() + READY_TIMEOUT_S
            while running.probe(name, "readinessProbe").returncode:
                assert process.poll() is None, f"{name} exited {process.returncode}"
                assert time.monotonic() < deadline, f"{name} did not become ready"
        yield running


@pytest.mark.parametrize("kind", ["startupProbe", "readinessProbe", "livenessProbe"])
@pytest.mark.parametrize("name", NAMES)
def test_each_probe_passes_while_the_services_run(cluster, name, kind):
    passed = cluster.probe(name, kind)
    assert passed.returncode == 0, passed.stdout + passed.stderr


def test_a_client_with_a_key_gets_an_answer(cluster, tmp_path):
    address = cluster.word("octavo-frontend:50050")
    environment = cluster.environment("frontend") | {"OCTAVO_FRONTEND": address}
    question = ["chat", "What is 7 + 5?", "--temperature", "0"]
    refused = cluster.run(question, environment)
    assert "API key" in refused.stderr
    key_file = tmp_path / "api-key"
    key_file.write_text(KEY)
    answer = cluster.run(question, environment | {"OCTAVO_API_KEY_FILE": str(key_file)})
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip()


def test_an_engine_takes_no_call_without_a_certificate_of_its_authority(cluster):
    environment = cluster.environment("engine")
    del environment["OCTAVO_TLS_CERT"], environment["OCTAVO_TLS_KEY"]
    words = container("engine")["readinessProbe"]["exec"]["command"][1:]
    assert cluster.run(words, environment).returncode == 1


@pytest.mark.parametrize("name", NAMES)
def test_the_kubelet_waits_longer_than_a_drain_takes(name):
    config = service_config(name)
    drain_s = getattr(config, "serving", config).drain_timeout_s
    hook = container(name).get("lifecycle", {}).get("preStop", {}).get("exec", {})
    program, pause_s = hook.get("command", ["sleep", "0"])
    assert program == "sleep"
    assert pod(name)["terminationGracePeriodSeconds"] >= drain_s + float(pause_s) + 10


@pytest.mark.parametrize("name", NAMES)
def test_every_selector_finds_its_pods(name):
    found = {"matchLabels": labels(name)}
    assert workload(name)["selector"] == found
    assert OBJECTS["Service", f"octavo-{name}"]["spec"]["selector"] == labels(name)
    assert OBJECTS["PodDisruptionBudget", f"octavo-{name}"]["spec"]["selector"] == found
    assert OBJECTS["NetworkPolicy", f"octavo-{name}"]["spec"]["podSelector"] == found


def test_the_frontend_sees_each_engine_by_one_name():
    service = OBJECTS["Service", workload("engine")["serviceName"]]
    assert service["spec"]["clusterIP"] == "None"
    (port,) = service["spec"]["ports"]
    address = f"{service['metadata']['name']}:{port['port']}"
    assert variables("frontend")["OCTAVO_FRONTEND_ENGINE_ADDRESS"] == address


def test_an_engine_has_one_gpu_and_the_frontend_none():
    assert container("engine")["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert "nvidia.com/gpu" not in container("frontend")["resources"]["limits"]


def test_only_frontends_reach_engines_and_engines_make_no_calls():
    rules = OBJECTS["NetworkPolicy", "octavo-engine"]["spec"]
    assert rules["policyTypes"] == ["Ingress", "Egress"]
    assert rules["egress"] == []
    (rule,) = rules["ingress"]
    assert rule["from"] == [{"podSelector": {"matchLabels": labels("frontend")}}]


@pytest.mark.parametrize("name", NAMES)
def test_a_container_is_read_only_and_without_privileges(name):
    security = container(name)["securityContext"]
    assert security["readOnlyRootFilesystem"] is True
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert pod(name)["securityContext"]["runAsUser"] == 10001
    assert pod(name)["automountServiceAccountToken"] is False


@pytest.mark.parametrize("name", NAMES)
def test_ports_mounts_and_volumes_agree(name):
    claims = workload(name).get("volumeClaimTemplates", [])
    volumes = {volume["name"] for volume in pod(name)["volumes"]}
    volumes |= {claim["metadata"]["name"] for claim in claims}
    assert {mount["name"] for mount in container(name)["volumeMounts"]} == volumes
    opened = {port["name"] for port in container(name)["ports"]}
    service = OBJECTS["Service", f"octavo-{name}"]["spec"]
    assert {port["targetPort"] for port in service["ports"]} == opened


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_manifest_has_the_shape_that_kubernetes_asks_for(file):
    tool = Path(sys.executable).parent / "kubernetes-validate"
    checked = subprocess.run(
        [tool, "--strict", file], capture_output=True, text=True, timeout=60, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
