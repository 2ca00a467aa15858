"""The services that drivers ask for vectors and scores."""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from services.engine.config.checkpoint import TINY_CHECKPOINT
from tests.support.processes import free_port, stack
from tests.support.scoring_checkpoint import write_scorer


@contextmanager
def vector_services() -> Iterator[dict[str, str]]:
    """Serves the embedded model with --task embed and --task score, under its own name.

    Yields the variables that name their URLs, without /v1: EMBED_URL and SCORE_URL.
    """
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
        write_scorer(Path(folder))
        urls = {}
        for task, model in (("embed", TINY_CHECKPOINT), ("score", Path(folder))):
            port = free_port()
            engine = {"task": task, "model": model, "served_model_name": TINY_CHECKPOINT.name}
            running.enter_context(stack(engine=engine, frontend={"http_port": port}))
            urls[f"{task.upper()}_URL"] = f"http://127.0.0.1:{port}"
        yield urls
