"""The parent of several processes, with processes that do nothing but hang."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import os, signal, sys
from services.frontend import process_group
from services.frontend.config import FrontendConfig
from services.frontend.process_group import ProcessGroup
from services.telemetry.logging import configure_logging

process_group.BEAT_INTERVAL_S = 0.01  # time passes faster for the parent
process_group.FIRST_BACKOFF_S = 0.01

def serve(config, share):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which may come before it has stopped
    share.beats.beat(share.index)
    if share.beats.num_lost["hung"]:
        os.kill(os.getppid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGSTOP)

configure_logging(service="frontend", level="info", log_format="json", error_messages=False)
config = FrontendConfig(engine_address="127.0.0.1:1", port=0, processes=2)
sys.exit(ProcessGroup(config, serve).run())
"""


def test_a_process_that_hangs_is_killed_counted_and_started_again():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    started = [line["pid"] for line in lines if line["event"] == "process_started"]
    hung = [line["pid"] for line in lines if line["event"] == "process_hung"]
    lost = {line["pid"]: line["exit_code"] for line in lines if line["event"] == "process_lost"}
    assert len(started) > 2, done.stderr
    assert sorted(hung) == sorted(started)
    assert lost[hung[0]] == -signal.SIGKILL
