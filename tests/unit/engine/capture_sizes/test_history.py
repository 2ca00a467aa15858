"""Steps are counted by kind and size; the counts outlive the engine and survive damage."""

import json
import os

import pytest
from structlog.testing import capture_logs

from models.cudagraph_mode import CUDAGraphMode
from services.engine.capture_sizes.history import (
    StepHistory,
    history_path,
    load_history,
    read_history,
    save_history,
)
from tests.support.engine_harness import engine_config
from tests.support.random_checkpoints import write_checkpoint


@pytest.fixture
def config(tmp_path):
    return engine_config(histogram_dir=str(tmp_path / "histograms"))


def empty(**sizes):
    return StepHistory(max_num_seqs=8, max_num_batched_tokens=64, **sizes)


def test_a_step_of_one_token_each_counts_by_requests_and_any_other_by_tokens():
    history = empty()
    for num_tokens, batch_size in ((3, 3), (3, 3), (1, 1), (40, 3), (3, 2)):
        history.count(num_tokens=num_tokens, batch_size=batch_size)
    assert history.decodes == {3: 2, 1: 1}
    assert history.others == {40: 1, 3: 1}
    assert history.num_steps == 5


def test_what_each_kind_of_graph_is_for_depends_on_the_mode():
    history = empty(decodes={2: 5}, others={9: 1})
    kinds = {mode: history.by_graph_kind(mode) for mode in CUDAGraphMode}
    assert kinds[CUDAGraphMode.FULL_AND_PIECEWISE] == ({2: 5}, {9: 1})
    assert kinds[CUDAGraphMode.FULL] == ({2: 5}, {9: 1})
    assert kinds[CUDAGraphMode.FULL_DECODE_ONLY] == ({2: 5}, {})
    assert kinds[CUDAGraphMode.PIECEWISE] == ({}, {2: 5, 9: 1})
    assert kinds[CUDAGraphMode.NONE] == ({}, {})


def test_the_next_run_starts_with_what_earlier_ones_saw(config):
    first = load_history(config)
    first.decodes, first.others = {2: 6, 3: 1}, {40: 1}
    first.cudagraph_mode, first.decode_graphs = "FULL_DECODE_ONLY", {8: 4096}
    assert save_history(first, history_path(config))
    second = load_history(config)
    assert second == first
    second.count(num_tokens=3, batch_size=3)
    assert (second.decodes, second.others) == ({2: 6, 3: 2}, {40: 1})
    assert read_history(history_path(config)).decodes == {2: 6, 3: 1}


def test_of_engines_that_share_a_folder_the_last_to_write_wins(config):
    one, two = load_history(config), load_history(config)
    one.count(num_tokens=1, batch_size=1)
    two.count(num_tokens=2, batch_size=2)
    save_history(one, history_path(config))
    save_history(two, history_path(config))
    assert load_history(config).decodes == {2: 1}


def test_other_models_and_limits_have_files_of_their_own(config, tmp_path):
    write_checkpoint(tmp_path / "other", "qwen3")
    changes = ({"model": tmp_path / "other"}, {"max_num_seqs": 4}, {"max_num_batched_tokens": 32})
    paths = {history_path(config.with_flags(**change)) for change in changes}
    assert len({*paths, history_path(config)}) == 4


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
        history = load_history(config)
    assert [line["event"] for line in logs] == ["step_history_not_read"]
    assert history == empty()
    history.count(num_tokens=2, batch_size=2)
    assert save_history(history, path)
    assert read_history(path).decodes == {2: 1}


def test_a_folder_that_cannot_be_written_costs_a_warning_and_no_steps(config, tmp_path):
    folder = tmp_path / "histograms"
    folder.write_text("in the way")
    history, path = empty(decodes={2: 3}), history_path(config)
    with capture_logs() as logs:
        assert not save_history(history, path)
    assert [line["event"] for line in logs] == ["step_history_not_written"]
    folder.unlink()
    assert save_history(history, path)
    assert read_history(path).decodes == {2: 3}


def test_a_write_that_fails_halfway_leaves_the_old_file_and_no_draft(config, monkeypatch):
    path = history_path(config)
    save_history(empty(decodes={2: 3}), path)
    before = path.read_bytes()

    def fail(*names, **folders):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with capture_logs():
        assert not save_history(empty(decodes={2: 4}), path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]
    assert json.loads(before)["decodes"] == {"2": 3}
