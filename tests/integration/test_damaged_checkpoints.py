"""An engine that is given a damaged checkpoint says why, exits, and never serves."""

import time

import pytest

from services.engine.config.checkpoint import TINY_CHECKPOINT
from tests.support.damaged_checkpoints import DAMAGES, copy_checkpoint
from tests.support.processes import start_engine

LONG_TIMEOUT_S = 60
KINDS = (
    "config.json is not JSON",
    "unknown quantisation",
    "truncated data",
    "index that leads out of the folder",
    "missing tensor",
    "not a number",
)


@pytest.mark.parametrize("kind", KINDS)
def test_engine_exits_with_the_reason_and_never_serves(tmp_path, kind):
    damage = DAMAGES[kind]
    damage.apply(copy_checkpoint(TINY_CHECKPOINT, tmp_path))
    process = start_engine(model=tmp_path, kv_cache_memory_mb=16)
    process.start()
    try:
        deadline = time.monotonic() + LONG_TIMEOUT_S
        while process.is_running and time.monotonic() < deadline:
            assert not process.is_serving()
            time.sleep(0.1)
        assert process.returncode, process.log
        assert [part for part in damage.message if part not in process.log] == [], process.log
    finally:
        process.kill()
