"""Step sizes outlive the engine, add up among engines, fade, and survive damage."""

import json
from collections import Counter

import pytest
from structlog.testing import capture_logs

from services.engine.capture_sizes import history as history_module
from services.engine.capture_sizes.histogram import StepHistogram
from services.engine.capture_sizes.history import (
    GraphCost,
    HistoryKeeper,
    StepHistory,
    history_path,
    read_history,
)
from tests.support.engine_harness import engine_config
from tests.support.random_checkpoints import write_checkpoint

COSTS = [GraphCost(uniform=True, num_tokens=8, num_bytes=4096, capture_s=0.5)]


@pytest.fixture
def config(tmp_path):
    return engine_config(histogram_dir=str(tmp_path / "histograms"))


class Engine:
    """A run of an engine that only counts steps."""

    def __init__(self, config):
        self.steps = StepHistogram()
        self.keeper = HistoryKeeper(config, self.steps)

    def run(self, **sizes):
        self.steps.decodes.update(Counter(sizes.get("decodes", {})))
        self.steps.others.update(Counter(sizes.get("others", {})))

    def save(self):
        self.keeper.save("FULL_DECODE_ONLY", COSTS)


def test_the_next_run_starts_with_what_earlier_ones_saw(config):
    first = Engine(config)
    first.run(decodes={2: 5}, others={40: 1})
    first.save()
    first.run(decodes={2: 1, 3: 1})
    first.save()
    second = Engine(config)
    second.run(decodes={3: 1})
    history = second.keeper.history
    assert (history.decodes, history.others) == ({2: 6, 3: 2}, {40: 1})
    assert (history.cudagraph_mode, history.graphs) == ("FULL_DECODE_ONLY", tuple(COSTS))
    assert history.costs(uniform=True) == {8: 4096}
    assert history.costs(uniform=False) == {}
    assert read_history(history_path(config)).decodes == {2: 6, 3: 1}


def test_an_eager_run_adds_its_steps_and_leaves_what_graphs_cost(config):
    first = Engine(config)
    first.run(decodes={2: 5})
    first.save()
    eager = Engine(config)
    eager.run(decodes={4: 1})
    eager.keeper.save("NONE", [])
    kept = read_history(history_path(config))
    assert (kept.cudagraph_mode, kept.graphs) == ("FULL_DECODE_ONLY", tuple(COSTS))
    assert kept.decodes == {2: 5, 4: 1}


def test_engines_that_share_a_folder_add_up(config):
    one, two = Engine(config), Engine(config)
    one.run(decodes={1: 10})
    two.run(decodes={1: 5, 2: 5})
    one.save()
    two.save()
    one.run(decodes={1: 1})
    one.save()
    assert read_history(history_path(config)).decodes == {1: 16, 2: 5}
    assert one.keeper.history.decodes == {1: 16, 2: 5}


def test_old_steps_weigh_less_where_there_are_many(config, monkeypatch):
    monkeypatch.setattr(history_module, "MAX_STEPS_KEPT", 100)
    engine = Engine(config)
    engine.run(decodes={1: 90, 7: 1})
    engine.save()
    engine.run(decodes={2: 80})
    engine.save()
    assert read_history(history_path(config)).decodes == {1: 45, 2: 40}


def test_other_models_and_limits_have_files_of_their_own(config, tmp_path):
    write_checkpoint(tmp_path / "other", "qwen3")
    changes = ({"model": tmp_path / "other"}, {"max_num_seqs": 4}, {"max_num_batched_tokens": 32})
    paths = {history_path(config.model_copy(update=change)) for change in changes}
    assert len({*paths, history_path(config)}) == 4


def test_nothing_is_written_where_nothing_ran_or_nothing_is_kept(config):
    Engine(config).save()
    assert not history_path(config).exists()
    nowhere = Engine(engine_config(histogram_dir=""))
    nowhere.run(decodes={1: 1})
    nowhere.save()
    assert nowhere.keeper.history.decodes == {1: 1}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"max_num_seqs": 8}',
        b'{"max_num_seqs": 8, "max_num_batched_tokens": 64, "decodes": {"0": 1}, "others": {}}',
        b'{"max_num_seqs": 8, "max_num_batched_tokens": 64, "decodes": {"1": -1}, "others": {}}',
        b'{"max_num_seqs": 8, "max_num_batched_tokens": 64, "decodes": {"65": 1}, "others": {}}',
        b'{"max_num_seqs": 8, "max_num_batched_tokens": 64, "decodes": {}, "others": {}, '
        b'"cudagraph_mode": "SOME"}',
    ],
)
def test_a_damaged_file_counts_as_none_and_is_replaced(config, content):
    path = history_path(config)
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=path.name):
        read_history(path)
    with capture_logs() as logs:
        engine = Engine(config)
    assert [line["event"] for line in logs] == ["step_history_not_read"]
    assert engine.keeper.history == StepHistory.empty(config)
    engine.run(decodes={2: 3})
    engine.save()
    assert read_history(path).decodes == {2: 3}


def test_a_folder_that_cannot_be_written_costs_a_warning_and_no_steps(config, tmp_path):
    folder = tmp_path / "histograms"
    folder.write_text("in the way")
    engine = Engine(config)
    engine.run(decodes={2: 3})
    with capture_logs() as logs:
        engine.save()
    assert [line["event"] for line in logs] == ["step_history_not_written"]
    folder.unlink()
    engine.save()
    assert read_history(history_path(config)).decodes == {2: 3}


def test_a_write_that_fails_halfway_leaves_the_old_file_and_no_draft(config, monkeypatch):
    engine = Engine(config)
    engine.run(decodes={2: 3})
    engine.save()
    path = history_path(config)
    before = path.read_bytes()

    def fail(self, target):
        raise OSError("disk full")

    monkeypatch.setattr(type(path), "replace", fail)
    engine.run(decodes={2: 1})
    with capture_logs():
        engine.save()
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]
    assert json.loads(before)["decodes"] == {"2": 3}
