"""The manifests of an engine on several hosts: run with loopback for the network, and no GPU."""

import os
import shutil
import time
from pathlib import Path

import yaml

from services.engine.config.engine_config import EngineConfig
from tests.integration.test_kubernetes import READY_TIMEOUT_S, ROOT, container, variables
from tests.support.certificates import LOOPBACK, Authority
from tests.support.forked_program import run_octavo, start_octavo
from tests.support.processes import free_port

FOLDER = ROOT / "deploy" / "kubernetes-nodes"
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())


def objects(file: str) -> dict[tuple[str, str], dict]:
    found = yaml.safe_load_all((FOLDER / file).read_text())
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


NODES = objects("nodes.yaml")
PATCHES = objects("engine.yaml")
NODE = NODES["StatefulSet", "octavo-node"]["spec"]
ENGINE_VARIABLES = variables("engine") | PATCHES["ConfigMap", "octavo-engine"]["data"]


def engine_config() -> EngineConfig:
    prefix = "OCTAVO_ENGINE_"
    flags = {
        key.removeprefix(prefix).lower(): value
        for key, value in ENGINE_VARIABLES.items()
        if key.startswith(prefix)
    }
    return EngineConfig.from_flags(host="0.0.0.0", **flags)


def test_all_files_are_used():
    named = {*KUSTOMIZATION["resources"], *(each["path"] for each in KUSTOMIZATION["patches"])}
    assert named == {"../kubernetes", "nodes.yaml", "engine.yaml"}


def test_the_pods_have_the_hosts_and_gpus_that_the_flags_say():
    parallel = engine_config().parallel
    patch = PATCHES["StatefulSet", "octavo-engine"]["spec"]
    (head,) = patch["template"]["spec"]["containers"]
    (node,) = NODE["template"]["spec"]["containers"]
    assert head["name"] == container("engine")["name"]
    assert patch["replicas"] == 1
    assert NODE["replicas"] == parallel.num_nodes - 1
    for each in (head, node):
        assert int(each["resources"]["limits"]["nvidia.com/gpu"]) == parallel.ranks_per_node


def test_mounts_and_volumes_of_a_node_agree():
    pod = NODE["template"]["spec"]
    volumes = {each["name"] for each in pod["volumes"]}
    volumes |= {each["metadata"]["name"] for each in NODE["volumeClaimTemplates"]}
    (node,) = pod["containers"]
    assert {each["name"] for each in node["volumeMounts"]} == volumes
    assert node["volumeMounts"] == container("engine")["volumeMounts"]


def test_the_kubelet_waits_for_the_engines_drain():
    pod = NODE["template"]["spec"]
    program, pause_s = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "sleep"
    assert float(pause_s) >= engine_config().serving.drain_timeout_s
    assert pod["terminationGracePeriodSeconds"] >= float(pause_s) + 10


def test_a_node_joins_the_engine_with_the_variables_of_the_manifests(tmp_path):
    authority, port = Authority(tmp_path), free_port()
    authority.issue("engine", LOOPBACK, "octavo-engine")
    tls = tmp_path / "tls"
    tls.mkdir()
    for source, target in (("engine.pem", "tls.crt"), ("engine.key", "tls.key")):
        shutil.copy(tmp_path / source, tls / target)
    shutil.copy(tmp_path / "ca.pem", tls / "ca.crt")
    folders = {"/tls": tls, "/model": ROOT / "models/checkpoints/tiny"}

    def here(given: dict[str, str]) -> dict[str, str]:
        """Returns variables with folders, network and numbers of this machine."""
        words = {
            "octavo-engine:50051": f"{LOOPBACK}:{port}",
            "eth0": "lo",
            "/home/octavo/.cache": str(tmp_path),
            "cuda": "cpu",
        }
        for value in given.values():
            for path, folder in folders.items():
                if value == path or value.startswith(f"{path}/"):
                    words[value] = f"{folder}{value.removeprefix(path)}"
            if value.startswith("/home/octavo/.cache"):
                words[value] = str(tmp_path / Path(value).name)
        return os.environ | {key: words.get(value, value) for key, value in given.items()}

    head_variables = here(ENGINE_VARIABLES) | {"OCTAVO_ENGINE_TENSOR_PARALLEL_SIZE": "1"}
    head_words = ["engine", "--host", LOOPBACK, "--port", str(port)]
    node_words = NODE["template"]["spec"]["containers"][0]["args"]
    head = start_octavo(*head_words, environment=head_variables)
    node_variables = here(NODES["ConfigMap", "octavo-node"]["data"])
    node = start_octavo(*node_words, environment=node_variables)
    try:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while run_octavo("health", f"{LOOPBACK}:{port}", environment=head_variables).returncode:
            assert head.poll() is None
            assert node.poll() is None
            assert time.monotonic() < deadline
    finally:
        for each in (node, head):
            each.terminate()
        assert [each.wait(60) for each in (node, head)] == [0, 0]
