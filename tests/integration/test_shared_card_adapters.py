"""Adapters of models that share a card: names, swaps, rights to load, and lost engines."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from services.client.health import LIVENESS
from tests.integration.test_shared_card import TINY, Shared, with_other_weights
from tests.support.adapters import tiny_factors, write_adapter
from tests.support.processes import free_port, start_engine, start_frontend

FLAGS = {"enable_sleep": True, "start_asleep": True, "num_kv_blocks": 128, "max_loras": 1}


def names(shared: Shared) -> dict[str, str]:
    """Returns the listed models and adapters, with the model of each adapter."""
    listed = httpx.get(f"{shared.url}/v1/models", timeout=60).json()["data"]
    return {card["id"]: card.get("parent", "") for card in listed}


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.01)


@pytest.mark.parametrize("level", [1, 2])
def test_adapters_of_models_that_share_a_card(tmp_path: Path, level: int) -> None:
    adapters = tmp_path / "adapters"
    for seed, name in enumerate(("a", "b", "later")):
        write_adapter(adapters / name, tiny_factors(seed))
    with_other_weights(tmp_path / "other")
    engines = {
        name: start_engine(
            model=model, lora=f"{lora}={adapters / lora}", lora_folder=adapters, **FLAGS
        )
        for name, model, lora in (("tiny", TINY, "a"), ("other", tmp_path / "other", "b"))
    }
    port = free_port()
    frontend = start_frontend(
        ",".join(each.address for each in engines.values()),
        http_port=port, swap_level=level, swap_min_awake_s=0.1, swap_drain_s=0,
        allow_lora_updates=True,
    )  # fmt: skip
    with ExitStack() as running:
        for each in (*engines.values(), frontend):
            running.push(each)
            each.start()
        for each in engines.values():
            each.wait_ready(LIVENESS)
        frontend.wait_ready()
        shared = Shared(engines, frontend, f"http://127.0.0.1:{port}")
        known = {"tiny": "", "a": "tiny", "other": "", "b": "other"}
        until(lambda: names(shared) == known)
        assert shared.awake() == []

        texts = {name: shared.text(name) for name in known}
        assert len(set(texts.values())) == len(texts)
        assert {name: shared.text(name) for name in reversed(known)} == texts
        assert shared.complete("absent").status_code == 404

        assert shared.awake() == ["tiny"]
        body = {"lora_name": "new", "lora_path": "later"}
        refused = shared.post("/v1/load_lora_adapter", **body)
        assert refused.status_code == 400
        assert "name the adapter's model" in refused.text
        taken = {**body, "lora_name": "a", "base_model_name": "other"}
        assert shared.post("/v1/load_lora_adapter", **taken).status_code in (400, 409)
        loaded = shared.post("/v1/load_lora_adapter", **body, base_model_name="other")
        assert loaded.status_code == 200, loaded.text
        assert shared.awake() == ["tiny"]
        assert names(shared) == {**known, "new": "other"}
        assert shared.text("new") not in texts.values()
        assert shared.post("/v1/unload_lora_adapter", lora_name="new").status_code == 200
        assert shared.complete("new").status_code == 404

        assert shared.text("tiny") == texts["tiny"]
        other = engines["other"]
        other.kill()
        until(lambda: names(shared) == {"tiny": "", "a": "tiny", "other": ""})
        other.start()
        until(lambda: names(shared) == known)
        assert shared.text("b") == texts["b"]
        assert shared.text("a") == texts["a"]
