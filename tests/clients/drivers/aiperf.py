"""aiperf, which measures servers."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.clients.trial import Report, check, served

NUM_REQUESTS = 8


def main() -> None:
    report = Report("aiperf")
    url, model = served()
    program = Path(sys.executable).parent / "aiperf"
    for endpoint in ("chat", "completions"):
        with report.trial(f"profile, endpoint type {endpoint}, streaming"):
            folder = Path(os.environ["TMPDIR"]) / endpoint
            result = subprocess.run(
                [
                    *(program, "profile", "--model", model, "--url", url.removesuffix("/v1")),
                    *("--endpoint-type", endpoint, "--streaming", "--ui", "none"),
                    *("--tokenizer", os.environ["TOKENIZER"], "--artifact-dir", folder),
                    *("--request-count", str(NUM_REQUESTS), "--synthetic-input-tokens-mean", "32"),
                    *("--output-tokens-mean", "8"),
                ],
                cwd=os.environ["TMPDIR"],
                capture_output=True,
                text=True,
                timeout=200,
                check=False,
            )
            check(result.returncode == 0, (result.stdout + result.stderr)[-250:])
            output = result.stdout + result.stderr
            found = next(folder.rglob("profile_export_aiperf.json"), None)
            check(found is not None, output[-250:])
            told = json.loads(found.read_text())
            check(told["request_count"]["avg"] == NUM_REQUESTS, told["request_count"])
    report.print()


if __name__ == "__main__":
    main()
