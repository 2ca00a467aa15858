"""GuideLLM, which measures servers."""

import os
import subprocess
import sys
from pathlib import Path

from tests.clients.trial import Report, check, served


def main() -> None:
    report = Report("guidellm")
    url, model = served()
    program = Path(sys.executable).parent / "guidellm"
    for rate in ("synchronous", "throughput"):
        with report.trial(f"benchmark, rate type {rate}"):
            result = subprocess.run(
                [
                    *(program, "benchmark", "--target", url.removesuffix("/v1"), "--model", model),
                    *("--processor", os.environ["TOKENIZER"], "--rate-type", rate),
                    *("--data", "prompt_tokens=32,output_tokens=8", "--max-requests", "8"),
                    *("--output-path", os.environ["TMPDIR"]),
                ],
                cwd=os.environ["TMPDIR"],
                capture_output=True,
                text=True,
                timeout=200,
                check=False,
            )
            check(result.returncode == 0, (result.stdout + result.stderr)[-250:])
    report.print()


if __name__ == "__main__":
    main()
