"""Every benchmark of a whole engine runs, here at sizes that measure nothing."""

import json
import random
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest

from services.engine.config.checkpoint import TINY_CHECKPOINT
from tests.bench.flood_attacks import ATTACKS
from tests.bench.soak_load import Load
from tests.support.draft_checkpoints import write_draft_checkpoint
from tests.support.forked_program import run_forked
from tests.support.random_checkpoints import write_checkpoint
from tests.support.vision_variants import write_vision_checkpoint

SMALL = (
    *("--shape", "tiny", "--device", "cpu", "--budget-s", "600", "--commit", "none"),
    *("--max-num-batched-tokens", "128", "--max-num-seqs", "4"),
)


def run(program: str, *arguments: str | Path) -> str:
    """Returns what a program prints."""
    result = run_forked(program, *map(str, arguments))
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def offline(tmp_path_factory) -> Path:
    """The result of the offline benchmark, with one part that cannot be measured."""
    out = tmp_path_factory.mktemp("bench") / "offline.json"
    run(
        "tests.bench.offline",
        *SMALL,
        *("--batches", "1,3,9", "--prompts", "256", "--requests", "4", "--repeats", "2"),
        *("--divide-by", "16", "--serving-repeats", "1", "--at-once", "1", "--out", out),
        *("--contexts", "128,512", "--cudagraph-mode", "full_decode_only"),
        "--capture-while-serving",
    )
    return out


def test_adapters_beside_none_are_measured(tmp_path):
    out = tmp_path / "adapters.json"
    few = ("--requests", "3", "--rank", "4", "--adapters", "0", "1", "2", "--context", "16")
    printed = run("tests.bench.adapters", "--shape", "tiny", "--device", "cpu", *few, "--json", out)
    assert "2 adapters" in printed
    rows = json.loads(out.read_text())["rows"]
    assert list(rows) == ["no room", "0 adapters", "1 adapters", "2 adapters"]
    assert all(row["median"] > 0 for row in rows.values())


def test_random_traffic_of_adapters_gets_the_tokens_of_merged_models(tmp_path):
    out = tmp_path / "soak.json"
    small = ("--minutes", "0.02", "--adapters", "4", "--slots", "2")
    printed = run("tests.bench.adapters_soak", *small, "--json", out)
    assert "slot loads" in printed
    figures = json.loads(out.read_text())["figures"]
    assert figures["requests"] > 0
    assert figures["different"] == 0
    assert figures["used blocks at the end"] == 0


def test_sessions_of_several_turns_are_measured(tmp_path):
    folder, out = tmp_path / "model", tmp_path / "turns.json"
    folder.mkdir()
    write_checkpoint(folder, "mamba2", max_position_embeddings=4096)
    shutil.copy(TINY_CHECKPOINT / "tokenizer.json", folder)
    few = ("--sessions", "3", "--turns", "3", "--system", "1200", "--divide-by", "4")
    engine = ("--device", "cpu", "--enforce-eager", "--budget-s", "600", "--commit", "none")
    run("tests.bench.turns", "--model", folder, *few, *engine, "--repeats", "1", "--out", out)
    result = json.loads(out.read_text())
    figures, facts = result["figures"], result["facts"]
    assert 0.2 < figures["prompt tokens from the cache"]["median"] < 0.9
    times = ("elapsed", "first token, median", "later token, p99", "copy of a snapshot")
    assert all(figures[name]["median"] > 0 for name in times)
    # A session says at most 63 tokens after its last snapshot, and all say a prompt at once.
    assert figures["tokens said before, computed again"]["median"] < 2 * 300 + 9 * 64
    assert facts["snapshots"]["made"] >= facts["snapshots"]["used"] >= 6
    assert facts["snapshots"]["bytes of one"] > 0
    assert result["problems"] == []


def test_prompts_with_images_are_measured(tmp_path):
    folder, out = tmp_path / "seeing", tmp_path / "images.json"
    folder.mkdir()
    write_vision_checkpoint(folder, "qwen3_vl", vocab_size=9000)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_CHECKPOINT / name, folder)
    few = ("--side", "4", "--requests", "3", "--outputs", "3", "--repeats", "2", "--out", out)
    few += ("--streams", "2", "--gaps-s", "0.6")
    run("tests.bench.images", "--model", folder, *SMALL[2:], "--enforce-eager", *few)
    figures = json.loads(out.read_text())["figures"]
    assert figures["first token, image"]["median"] > 0
    assert figures["3 requests, image, rate"]["median"] > 0
    assert figures["gaps beside, longest"]["median"] >= figures["gaps beside, median"]["median"] > 0
    assert figures["3 requests, image, steps in graphs"]["median"] == 0
    assert figures["3 requests, image, images in graphs"]["median"] == 0
    assert json.loads(out.read_text())["facts"]["images encoded, image"] == {"eager": 3}


def test_an_encoder_is_measured_in_every_form(tmp_path):
    out = tmp_path / "encoder.json"
    few = ("--sides", "4", "--images", "1", "2", "--rounds", "1", "--num-layers", "1")
    run("tests.bench.image_encoder", "--device", "cpu", "--profile", *few, "--out", out)
    figures = json.loads(out.read_text())["figures"]
    for name in ("eager", "compiled", "graph", "padded graph", "one attention"):
        for count in (1, 2):
            figure = figures[f"qwen3-vl-8b {count} x 4 {name}"]
            assert figure["median"] > figure["floor"] > 0


def test_vectors_of_short_and_long_inputs_are_measured(tmp_path):
    out = tmp_path / "embeddings.json"
    few = ("--lengths", "4,2048", "--tokens", "40", "--repeats", "2", "--enforce-eager")
    run("tests.bench.embeddings", *SMALL, *few, "--out", out)
    figures = json.loads(out.read_text())["figures"]
    for name in ("10 inputs of 4", "1 inputs of 2048"):
        assert figures[name]["median"] > 0
        assert figures[f"{name}, rate"]["median"] > 0


def test_gaps_between_tokens_are_measured_from_the_start_on(tmp_path):
    out = tmp_path / "busy.json"
    few = ("--streams", "2", "--after-s", "0.5", "--cudagraph-mode", "full_decode_only")
    run("tests.bench.busy_start", *SMALL, *few, "--out", out)
    figures = json.loads(out.read_text())["figures"]
    assert 0 < figures["afterwards: median"]["median"] <= figures["afterwards: longest"]["median"]


def test_latencies_of_requests_that_arrive_one_by_one_are_measured(tmp_path):
    out = tmp_path / "arrivals.json"
    few = ("--rates", "4,8", "--seconds", "1.5", "--divide-by", "32", "--enforce-eager")
    run("tests.bench.arrivals", *SMALL, *few, "--out", out)
    content = json.loads(out.read_text())
    figures = content["figures"]
    for rate in ("4/s", "8/s"):
        assert content["facts"][f"{rate}: requests"] > 0
        for name in ("first token", "between tokens", "per token"):
            median, p99 = (figures[f"{rate}: {name}, {each}"] for each in ("median", "p99"))
            assert 0 <= median["median"] <= p99["median"]
        assert figures[f"{rate}: throughput"]["median"] > 0


@pytest.mark.parametrize("whole", [0, 6])
def test_throughput_at_fixed_lengths_is_measured(whole, tmp_path):
    out = tmp_path / "lengths.json"
    rows = ("--lengths", "24x8,8x24", "--seconds", "0.5", "--whole", str(whole))
    run("tests.bench.fixed_lengths", *SMALL, *rows, "--first", "4", "--out", out)
    content = json.loads(out.read_text())
    assert not content["problems"]
    for name in ("24/8", "8/24"):
        assert content["figures"][f"{name}, output"]["median"] > 0
        facts = content["facts"][name]
        assert (facts["requests"], facts["ended"]) == (6, 6) if whole else facts["requests"] >= 8


def test_the_accuracy_of_a_cache_of_8_bits_is_measured(tmp_path):
    for source in ((), ("--shape", "tiny")):
        out = tmp_path / "accuracy.json"
        few = ("--sequences", "2", "--tokens", "8")
        run("tests.bench.kv_accuracy", *source, *few, "--json", out)
        content = json.loads(out.read_text())
        assert 0 < content["figures"]["relative error, mean"]["median"] < 0.5
        assert 0 < content["figures"]["KL divergence, mean"]["median"] < 0.5
        assert 0 < content["figures"]["equal greedy tokens"]["median"] <= 1
        assert content["facts"]["positions"] >= 16


def test_ways_of_drafting_are_measured(tmp_path):
    out = tmp_path / "drafts.json"
    few = ("--ways", "none,head", "--batches", "2", "--outputs", "8", "--repeats", "1")
    run("tests.bench.drafts", *SMALL, *few, "--enforce-eager", "--out", out)
    content = json.loads(out.read_text())
    ways = ["none", "head, fixed", "head, adaptive"]
    names = [f"{way}, batch 2" for way in ways]
    assert set(content["figures"]) == {*names, *(f"{name}, worker idle" for name in names)}
    assert 0 <= content["facts"]["head, fixed, batch 2, drafts that held"] <= 3


def test_the_soak_loads_both_services_in_every_way_and_all_is_given_back(tmp_path):
    out = tmp_path / "soak.json"
    printed = run("tests.bench.soak", "--minutes", "0.02", "--warm-up-s", "0.1", "--json", out)
    content = json.loads(out.read_text())
    assert all(sum(counts.values()) for counts in content["ends"].values())
    assert set(content["ends"]) == set(Load("", 0, random.Random(0)).kinds())
    for kind in ("live requests", "used blocks"):
        assert content["held"][f"engine: {kind}"]["idle"] == 0
    assert "frontend: memory, MiB" in printed


def test_the_churn_of_tiers_compares_every_text():
    printed = run("tests.bench.tier_churn", "--minutes", "0.03", "--documents", "2")
    counts = json.loads(printed)
    assert counts["compared"] > 0
    assert counts["kills"] >= 1


def test_returns_from_lower_tiers_are_measured(tmp_path):
    out = tmp_path / "tiers.json"
    short = ("--length", "400", "--host-gb", "0.03", "--disk-gb", "0.03", "--decodes", "1")
    small = ("--shape", "tiny", "--device", "cpu", "--enforce-eager", "--max-model-len", "1100")
    run("tests.support.tier_returns", *short, *small, "--out", out)
    content = json.loads(out.read_text())
    assert content["problems"] == []
    assert content["facts"]["share of tokens from host"] > 0.5
    assert content["facts"]["share of tokens from disk"] > 0.5
    assert content["facts"]["share of the reading speed, disk"] > 0


def test_the_soak_of_ranks_kills_one_and_every_token_comes(tmp_path):
    out = tmp_path / "ranks.json"
    short = ("--seconds", "2", "--kill-every-s", "1.5", "--clients", "3", "--tokens", "40")
    small = ("--shape", "tiny", "--device", "cpu", "--max-num-batched-tokens", "128")
    engine = ("--worker-patience-s", "100", "--no-enable-prefix-caching")
    printed = run("tests.bench.rank_soak", *short, *small, *engine, "--json", out)
    content = json.loads(out.read_text())
    assert content["ends"]["equal"] > 0
    assert set(content["ends"]) <= {"equal", "refused: UNAVAILABLE"}
    assert sum(content["kills"].values()) == content["restarts"] == len(content["outages_s"]) == 1
    assert content["tokens"]["missing"] == content["tokens"]["surplus"] == 0
    for name in ("live requests", "used blocks"):
        assert content["held"][name] == [0, 0]
    before, after = content["held"]["engine: child processes"]
    assert before == after == 2
    for name, expected in (("processes", 4), ("listening ports", 6)):
        assert content["held"][f"all: {name}"] == [expected, expected]
    assert content["left"]["processes"] == []
    assert "outages, s: median" in printed


def test_floods_attack_both_services_in_every_way(tmp_path):
    out = tmp_path / "floods.json"
    short = ("--seconds", "0.3", "--rest-s", "0", "--rounds", "1")
    run("tests.bench.floods", *short, "--json", out)
    rows = {row["attack"]: row for row in json.loads(out.read_text())["rows"]}
    assert set(rows) == set(ATTACKS)
    for row in rows.values():
        assert row["after_mib"]["frontend"] > 0
        assert row["sent"]["frontend"]["bytes"] > 0
        assert row["sent"]["engine"]["bytes"] > 0


def test_offline_has_every_figure_and_says_what_is_missing(offline):
    content = json.loads(offline.read_text())
    assert set(content["figures"]) == {
        "start to ready",
        "start to first token",
        "decode, batch 1",
        "decode, batch 3",
        "decode, batch 1 after 512 tokens",
        "decode, batch 3 after 512 tokens",
        "prefill, 256 tokens",
        "serving",
        "serving, output",
        "serving, first token p50",
        "serving, 1 at once",
    }
    assert content["problems"] == [
        "decode, batch 9: max_num_seqs is 4",
        "decode, batch 9 after 512 tokens: max_num_seqs is 4",
    ]
    facts = content["facts"]
    assert facts["graphs"]["num_captured"] == facts["graphs"]["num_planned"] > 0
    assert facts["serving"]["hit_rate"] > 0.5
    assert facts["serving, 1 at once"]["num_steps"] > facts["serving"]["num_steps"]
    assert facts["memory"]["kv_blocks"] > 0
    assert facts["start"]["import"] > 0


def test_serving_is_modelled_from_measured_steps(tmp_path):
    out = tmp_path / "model.json"
    figures = ("--decodes", "1:2,16:4", "--prompts", "64:4,128:8", "--divide-by", "16")
    policies = ("--policy", "max_num_seqs=4", "--policy", "max_num_seqs=16")
    few = ("--requests", "24", "--max-num-batched-tokens", "64", "--out", out)
    run("tests.bench.serving_model", "--shape", "tiny", *figures, *policies, *few)
    content = json.loads(out.read_text())
    few, many = (content["facts"][f"serving, max_num_seqs={size}"] for size in (4, 16))
    assert (few["running at most"], many["running at most"]) == (4, 16)
    assert few["steps"]["decodes"] > many["steps"]["decodes"]
    figure = content["figures"]["serving, max_num_seqs=16"]
    assert figure["median"] == pytest.approx(sum(many["seconds"].values()), abs=0.02)


def test_results_are_drawn_and_compared(offline, tmp_path):
    picture = tmp_path / "offline.svg"
    run("tests.bench.plot", offline, "--out", picture)
    ElementTree.parse(picture)
    assert "same within the spread" in run(
        "services.client.cli", "bench", "compare", offline, offline
    )


def test_serving_goes_over_both_services(tmp_path):
    out = tmp_path / "serving.json"
    run(
        "tests.bench.serving",
        *SMALL,
        *("--requests", "6", "--repeats", "1", "--divide-by", "16", "--clients", "2"),
        *("--out", out),
    )
    content = json.loads(out.read_text())
    assert content["problems"] == []
    for path in ("offline", "engine", "services"):
        assert content["figures"][f"serving, {path}, output"]["median"] > 0
    assert content["figures"]["throughput, services / offline"]["median"] > 0
    assert set(content["facts"]["services"]["cpu_share"][0]) == {
        "engine",
        "frontend",
        "worker",
        "busiest client",
    }


def test_levels_compares_with_eager_and_reports_rows_that_fail(tmp_path):
    out = tmp_path / "levels.json"
    table = run(
        "tests.bench.levels",
        *SMALL,
        *("--levels", "0,3", "--modes", "none,full_and_piecewise", "--batches", "2"),
        *("--prompts", "64", "--requests", "3", "--repeats", "1", "--divide-by", "16"),
        *("--skip-cold", "--splitting-ops", "octavo::no_such_op", "--no-use-inductor"),
        *("--out", out),
    )
    rows = json.loads(out.read_text())["facts"]["rows"]
    assert rows["level 0 none"]["agreement"]["num_equal"] == 3
    assert rows["level 0 none"]["error"] == ""
    assert "octavo::no_such_op does not occur" in rows["level 3 full_and_piecewise"]["error"]
    assert len(table.splitlines()) == 2 + len(rows)


def test_levels_measures_a_start_with_empty_caches_alone(tmp_path):
    out = tmp_path / "levels.json"
    chosen = ("--levels", "0", "--modes", "none", "--batches", "2", "--only-cold")
    run("tests.bench.levels", *SMALL, *chosen, "--divide-by", "16", "--out", out)
    measured = json.loads(out.read_text())
    assert list(measured["figures"]) == ["level 0 none, cold start"]
    assert set(measured["facts"]["rows"]["level 0 none"]) == {"error", "cold", "graphs"}


def test_step_trace_draws_steady_steps(tmp_path):
    out, picture = tmp_path / "steps.json", tmp_path / "steps.svg"
    run(
        "tests.bench.step_trace",
        *SMALL,
        *("--batch", "1,4", "--steps", "10", "--profiled-steps", "6"),
        *("--out", out, "--svg", picture),
    )
    figures = json.loads(out.read_text())["figures"]
    assert figures["batch 4, host, schedule and update"]["median"] > 0
    assert figures["batch 1, host, worker"]["median"] > 0
    ElementTree.parse(picture)


@pytest.mark.parametrize("mode", ["none", "full"])
def test_layer_profile_runs_decodes_prompts_and_both(mode, tmp_path):
    out = tmp_path / "profile.json"
    points = ("--points", "1,4,p64,3+16", "--context", "128", "--cudagraph-mode", mode)
    printed = run("tests.bench.layer_profile", *SMALL, *points, "--out", out)
    content = json.loads(out.read_text())
    assert set(content["figures"]) == {f"{point}, step" for point in ("1", "4", "p64", "3+16")}
    assert content["problems"] == []
    # The profiler shows no kernels of a CPU.
    assert printed.count("nothing ran on a device that the profiler watches") == 4
    graphs = ("graph of 4 tokens", "graph of 64 tokens", "graph of 32 tokens")
    assert [f": {graph}\n" in printed for graph in graphs] == [mode == "full"] * 3


def test_speculation_is_timed_with_and_without_graphs_of_drafting(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    write_draft_checkpoint(folder, agreement=0.98, max_position_embeddings=1024)
    out = tmp_path / "speculation.json"
    few = ("--batch", "1,3", "--drafts", "0,2", "--steps", "5", "--commit", "none")
    printed = run(
        "tests.bench.speculation", "--model", folder, "--device", "cpu", *few, "--out", out
    )
    content = json.loads(out.read_text())
    ways = ("k = 0", "k = 2, eager", "k = 2, graph")
    steps = {f"{way}, batch {batch}" for way in ways for batch in (1, 3)}
    assert set(content["figures"]) == steps | {
        f"{each}, drafting" for each in steps if "2," in each
    }
    assert content["problems"] == []
    assert 1 < content["facts"]["k = 2, graph, batch 3, tokens of a request in a step"] <= 3
    assert [line.split()[:3] for line in printed.splitlines()[1:4]] == [
        ["1", "0", "none"],
        ["1", "2", "eager"],
        ["1", "2", "graph"],
    ]


def test_large_steps_compares_graphs_with_eager_steps(tmp_path):
    out = tmp_path / "large.json"
    sizes = ("--sizes", "32", "64", "--rounds", "1", "--device", "cpu")
    run("tests.bench.large_steps", "--shape", "tiny", *sizes, "--out", out)
    rows = json.loads(out.read_text())["rows"]
    assert [(row["num_tokens"], row["shorter"], row["fault"]) for row in rows] == [
        (32, 31, ""),
        (64, 61, ""),
    ]
    assert all(row["eager_ms"] > 0 and row["padded_graph_ms"] > 0 for row in rows)


def test_sleep_is_measured_beside_copies_and_loading(tmp_path):
    out = tmp_path / "sleep.json"
    few = ("--device", "cpu", "--repeats", "2", "--num-kv-blocks", "64", "--commit", "none")
    run("tests.bench.sleep_times", "--shape", "tiny", *few, "--out", out)
    content = json.loads(out.read_text())
    assert content["problems"] == []
    for level in (1, 2):
        assert content["figures"][f"level {level}, waking"]["floor"] > 0
        assert content["figures"][f"level {level}, falling asleep"]["median"] > 0


def test_swaps_of_two_models_under_load_are_measured(tmp_path):
    out = tmp_path / "swaps.json"
    few = ("--device", "cpu", "--seconds", "1", "--streams", "2", "--max-tokens", "300")
    turns = ("--swap-min-awake-s", "0.3", "--swap-drain-s", "0", "--commit", "none")
    run("tests.bench.model_swaps", "--shape", "tiny", *few, *turns, "--out", out)
    content = json.loads(out.read_text())
    assert content["problems"] == []
    assert content["facts"]["streams that ended"] >= 4
    assert content["figures"]["swap"]["median"] > 0
