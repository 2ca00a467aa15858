"""A worker that misbehaves if it is the rank that a test has chosen.

The environment says how, as `ODD_RANKS` (numbers, with commas) and `ODD_WAY`, a function's name
here. With `ODD_MEETING_LIMIT_S` all ranks wait that long for each other. A test puts this module in
place of the worker's by `use_odd_ranks`.
"""

import os
import sys
import time
from pathlib import Path

MODULE = "tests.support.odd_rank"


def use_odd_ranks(monkeypatch, way, *ranks):
    """Makes some ranks of the workers started from now on behave as the function `way` does."""
    from services.engine.worker import rank_process

    monkeypatch.setattr(rank_process, "WORKER_MODULE", MODULE)
    monkeypatch.setenv("ODD_WAY", way.__name__)
    monkeypatch.setenv("ODD_RANKS", ",".join(map(str, ranks)))


def never_starts():
    time.sleep(3600)


def starts_slowly():
    time.sleep(0.5)


def has_another_checkpoint():
    from services.engine.worker.start import startup

    startup.checkpoint_digest = lambda folder, load_format: "of something else"


def finds_faults():
    """Fails the test of every graph of decodes."""
    from models.cudagraph_mode import GraphKind
    from services.engine.compilation.graphs.graph_runner import GraphCapture

    finish = GraphCapture.finish

    def find_fault(self, agree=str):
        if self.key.kind is GraphKind.DECODE:
            return finish(self, lambda fault: agree("a fault of one rank"))
        return finish(self, agree)

    GraphCapture.finish = find_fault


def compiles_when_let():
    """Compiles once the file in ODD_GATE is there."""
    from services.engine.worker.start.model_compilation import ModelCompilation

    run, gate = ModelCompilation.run, Path(os.environ["ODD_GATE"])

    def wait_and_run(self, turns=None):
        while not gate.exists():
            time.sleep(0.01)
        run(self, turns)

    ModelCompilation.run = wait_and_run


def fails_to_compile():
    from services.engine.worker.start.loaded_model import LoadedModel

    def fail(self, settings, pieces):
        raise RuntimeError("planted")

    LoadedModel.compile = fail


def has_few_blocks():
    from services.engine.worker.start import startup

    startup.choose_num_blocks = lambda *args, **options: 23


def runs_out_of_memory():
    """Fails in the third step, before it computes anything, and never again."""
    from services.engine.worker.runner.model_runner import ModelRunner

    execute, left = ModelRunner.execute, [3]

    def fail_once(self, descriptor):
        left[0] -= 1
        if left[0] == 0:
            raise MemoryError
        return execute(self, descriptor)

    ModelRunner.execute = fail_once


def main() -> int:
    """Runs the worker."""
    rank = sys.argv[sys.argv.index("--rank") + 1]
    if limit_s := os.environ.get("ODD_MEETING_LIMIT_S"):
        from services.engine.worker.start import ranks

        ranks.MEETING_LIMIT_S = float(limit_s)
    if rank in os.environ["ODD_RANKS"].split(","):
        globals()[os.environ["ODD_WAY"]]()
    from services.engine.worker import __main__ as worker

    return worker.main()


if __name__ == "__main__":
    sys.exit(main())
