"""GuideLLM, which measures servers."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.clients.trial import Report, check, served

NUM_REQUESTS = 8


def main() -> None:
    report = Report("guidellm")
    url, model = served()
    backend = f"kind=openai_http,target={url.removesuffix('/v1')},model={model}"
    for what, format_ in (("chat", ""), ("completions", ",request_format=/v1/completions")):
        for profile in ("synchronous", "concurrent,streams=4"):
            with report.trial(f"run, {what}, profile {profile}"):
                check_run(f"{backend}{format_}", profile)
    report.print()


def check_run(backend: str, profile: str) -> None:
    """Raises an exception unless every request of a run succeeds."""
    told = Path(os.environ["TMPDIR"]) / "told.json"
    result = subprocess.run(
        [
            *(Path(sys.executable).parent / "guidellm", "run", "--disable-progress"),
            *("--backend", backend, "--profile", f"kind={profile}"),
            *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
            *("--tokenizer", f"kind=huggingface_auto,model={os.environ['TOKENIZER']}"),
            *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"),
            *("--output", f"kind=json,path={told}"),
        ],
        cwd=told.parent,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    check(result.returncode == 0, (result.stdout + result.stderr)[-250:])
    [benchmark] = json.loads(told.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    check(totals["successful"] >= NUM_REQUESTS and totals["errored"] == 0, totals)


if __name__ == "__main__":
    main()
