"""Compose files that scripts/try_containers changes for Podman."""

import pytest
import yaml

from scripts.container_programs import ROOT, portable

FILES = [
    "docker-compose.yml",
    "deploy/docker-compose.tls.yml",
    "deploy/docker-compose.observability.yml",
]


@pytest.mark.parametrize("file", FILES)
def test_a_copy_means_the_same_in_another_folder(file):
    original = (ROOT / file).read_text()
    copy = portable(original)
    assert "start_interval" not in copy
    for service in yaml.safe_load(copy)["services"].values():
        assert service.get("build", {}).get("context", str(ROOT)) == str(ROOT)
        for volume in service.get("volumes", []):
            assert "./" not in volume
    assert len(yaml.safe_load(copy)["services"]) == len(yaml.safe_load(original)["services"])
