"""How `octavo graphs` shows what an engine captured."""

from rich.console import Console

from protos.engine.v1 import engine_pb2
from protos.engine.v1.batch_pb2 import GraphKind
from services.client.commands.graphs import report


def graph(num_tokens, **fields):
    values = {
        "graph_bs": num_tokens,
        "max_q_len": 1,
        "kind": GraphKind.GRAPH_KIND_DECODE,
        "captured": True,
    }
    return engine_pb2.GraphStats(num_tokens=num_tokens, **{**values, **fields})


def shown(stats):
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        console.print(report("host:1", stats))
    return capture.get()


def test_costs_hit_rate_and_padding_are_reported_as_a_whole_and_by_graph():
    stats = engine_pb2.GetStatsResponse(
        cudagraph_mode="FULL_AND_PIECEWISE",
        num_graphs_planned=3,
        num_steps=100,
        graph_dispatch={"graph": 95, "uncaptured": 3, "oversize": 2},
        graphs=[
            graph(8, num_replays=75, padded_tokens=60, capture_s=0.25, num_bytes=3 * 2**20),
            graph(
                64,
                kind=GraphKind.GRAPH_KIND_PIECEWISE,
                num_replays=20,
                padded_tokens=128,
                capture_s=1.5,
            ),
            graph(64, graph_bs=32, kind=GraphKind.GRAPH_KIND_MIXED),
        ],
    )
    text = shown(stats)
    assert "host:1: FULL_AND_PIECEWISE" in text
    assert "3/3 graphs, captured in 1.8 s, 3 MiB; hit rate 95.0% of 100 steps" in text
    assert "padding 10.0%" in text.replace("\n", " ")
    lines = text.splitlines()
    decode = next(line for line in lines if "decode" in line)
    cells = [cell.strip() for cell in decode.strip("│").split("│")]
    assert cells == ["decode", "8", "250 ms", "3.0 MiB", "75", "75.0%", "10.0%"]
    assert any("pieces" in line and "20.0%" in line for line in lines)
    assert any("prompts of 32" in line for line in lines)
    assert "steps without a graph: 2 oversize, 3 uncaptured" in text


def test_matches_of_compiler_passes_are_printed_in_a_line():
    stats = engine_pb2.GetStatsResponse(pass_matches={"norm_linear": 4, "linear_gate": 2})
    assert "compiler passes: linear_gate 2, norm_linear 4" in shown(stats)


def test_the_coverage_is_printed_in_a_line():
    stats = engine_pb2.GetStatsResponse(
        num_graphs_planned=2,
        decode_coverage=engine_pb2.GraphCoverage(sizes=[8, 512], limit=256),
        other_coverage=engine_pb2.GraphCoverage(sizes=[512], limit=8192),
    )
    text = shown(stats)
    assert "covers decodes up to 256 of 256, other steps up to 512 of 8192 tokens" in text
    stats.other_coverage.ClearField("sizes")
    assert "covers decodes up to 256 of 256, no other steps" in shown(stats)


def test_a_graph_that_was_given_up_says_why():
    stats = engine_pb2.GetStatsResponse(
        cudagraph_mode="FULL_DECODE_ONLY",
        num_graphs_planned=1,
        graphs=[graph(8, captured=False, fault="input seq_lens moved")],
    )
    text = shown(stats)
    assert "0/1 graphs" in text
    assert "given up" in text
    assert "the graph of 8 decodes is not used: input seq_lens moved" in text


def test_graphs_of_drafting_differ_from_those_of_their_steps():
    stats = engine_pb2.GetStatsResponse(
        num_graphs_planned=2,
        num_steps=10,
        graphs=[
            graph(24, max_q_len=3, num_replays=9),
            graph(
                24, max_q_len=3, kind=GraphKind.GRAPH_KIND_DRAFT, captured=False, fault="planted"
            ),
        ],
    )
    text = shown(stats)
    assert any("drafts" in line and "given up" in line for line in text.splitlines())
    assert "the graph of 24 tokens' drafts is not used: planted" in text


def test_patches_of_the_encoder_are_no_tokens_of_steps():
    encoder = {"kind": GraphKind.GRAPH_KIND_ENCODER, "num_replays": 4, "padded_tokens": 1024}
    stats = engine_pb2.GetStatsResponse(
        num_graphs_planned=2,
        num_steps=10,
        graphs=[graph(8, num_replays=5, padded_tokens=10), graph(1024, **encoder)],
    )
    text = shown(stats)
    assert "padding 25.0%" in text.replace("\n", " ")
    line = next(line for line in text.splitlines() if "encoder" in line)
    cells = [cell.strip() for cell in line.strip("│").split("│")]
    assert cells[:2] + cells[4:] == ["encoder", "1024", "4", "40.0%", "25.0%"]


def test_an_engine_without_graphs_says_so_in_a_line():
    stats = engine_pb2.GetStatsResponse(
        cudagraph_mode="NONE", num_steps=4, graph_dispatch={"unsupported": 4}
    )
    text = shown(stats)
    assert "NONE" in text
    assert "0/0 graphs; hit rate 0.0% of 4 steps" in text
    assert "steps without a graph: 4 unsupported" in text


def test_graphs_of_steps_that_share_prefixes_say_so():
    shared = {"shares_prefixes": True, "num_replays": 7}
    stats = engine_pb2.GetStatsResponse(
        num_graphs_planned=3,
        graphs=[
            graph(8),
            graph(8, **shared),
            graph(64, graph_bs=32, kind=GraphKind.GRAPH_KIND_MIXED, **shared),
            graph(16, captured=False, fault="logits differ", **shared),
        ],
    )
    text = shown(stats)
    assert "decode, shared" in text
    assert "prompts of 32, shared" in text
    assert "16 decodes that share prefixes is not used: logits differ" in text


def test_the_room_for_states_is_printed_in_a_line():
    stats = engine_pb2.GetStatsResponse(
        num_blocks=1001, num_state_blocks=50, state_bytes=61 * 2**20, num_running=3,
        num_snapshots=7, num_snapshots_made=9, num_snapshots_used=5, num_recomputed_tokens=640,
    )  # fmt: skip
    text = " ".join(shown(stats).split())
    assert "states: 50 blocks or 61 MiB each, 20 at most, 3 live" in text
    assert "7 snapshots kept, 9 made, 5 used; 640 tokens computed again" in text
    assert "states" not in shown(engine_pb2.GetStatsResponse())


def test_graphs_of_steps_without_adapters_say_so():
    stats = engine_pb2.GetStatsResponse(
        num_graphs_planned=2,
        graphs=[
            graph(8, skips_adapters=True, num_replays=7),
            graph(16, captured=False, fault="logits differ", skips_adapters=True),
        ],
    )
    text = shown(stats)
    assert "decode, no adapters" in text
    assert "16 decodes without adapters is not used: logits differ" in text
