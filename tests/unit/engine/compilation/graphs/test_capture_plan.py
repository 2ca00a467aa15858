"""Which graphs are captured: what was asked for, less what cannot be done."""

from dataclasses import replace

import pytest

from models.cudagraph_mode import CUDAGraphMode as Mode
from models.cudagraph_mode import GraphKind
from models.ops.attention.cudagraph_support import AttentionCGSupport as Support
from services.engine.compilation.graphs.capture_plan import (
    FEW_REQUESTS,
    MANY_REQUESTS,
    GraphSupport,
    full_decode_key,
    graph_support,
    mixed_keys,
    piecewise_key,
    planned_keys,
    supported_mode,
    with_draft_keys,
)
from services.engine.config.compilation_level import CompilationLevel

EVERYTHING = GraphSupport(full_decode=True, pieces=True, prompts=True)
NO_PROMPTS = GraphSupport(full_decode=True, pieces=True, prompts=False)
NO_PIECES = GraphSupport(full_decode=True, pieces=False)
NO_FULL = GraphSupport(full_decode=False, pieces=True)
NOTHING = GraphSupport(full_decode=False, pieces=False)


@pytest.mark.parametrize(
    ("wanted", "support", "mode"),
    [
        (Mode.NONE, EVERYTHING, Mode.NONE),
        (Mode.PIECEWISE, EVERYTHING, Mode.PIECEWISE),
        (Mode.FULL_DECODE_ONLY, EVERYTHING, Mode.FULL_DECODE_ONLY),
        (Mode.FULL_AND_PIECEWISE, EVERYTHING, Mode.FULL_AND_PIECEWISE),
        (Mode.FULL, EVERYTHING, Mode.FULL),
        (Mode.FULL, NO_PROMPTS, Mode.FULL_AND_PIECEWISE),
        (Mode.FULL, NO_PIECES, Mode.FULL_DECODE_ONLY),
        (Mode.FULL_AND_PIECEWISE, NO_PIECES, Mode.FULL_DECODE_ONLY),
        (Mode.PIECEWISE, NO_PIECES, Mode.NONE),
        (Mode.FULL_AND_PIECEWISE, NO_FULL, Mode.PIECEWISE),
        (Mode.FULL, NO_FULL, Mode.PIECEWISE),
        (Mode.FULL_DECODE_ONLY, NO_FULL, Mode.PIECEWISE),
        (Mode.FULL_DECODE_ONLY, NO_PIECES, Mode.FULL_DECODE_ONLY),
        *((mode, NOTHING, Mode.NONE) for mode in Mode),
    ],
)
def test_a_mode_is_taken_down_to_what_can_be_captured(wanted, support, mode):
    assert supported_mode(wanted, support).mode is mode


def test_a_decode_that_cannot_be_whole_runs_in_pieces_if_there_are_some():
    decode = supported_mode(Mode.FULL_AND_PIECEWISE, NO_FULL).mode.decode_mode()
    assert decode is Mode.PIECEWISE


def test_whole_steps_come_first_and_of_each_kind_the_large_ones():
    keys = planned_keys(
        Mode.FULL_AND_PIECEWISE, decode_sizes=(1, 4), token_sizes=(8, 64), max_num_seqs=4
    )
    assert keys == [
        full_decode_key(4),
        full_decode_key(1),
        piecewise_key(64),
        piecewise_key(8),
    ]


def test_full_graphs_are_those_of_decodes_and_of_steps_with_prompts():
    keys = planned_keys(
        Mode.FULL, decode_sizes=(4,), token_sizes=(1, 2, 64), max_num_seqs=FEW_REQUESTS
    )
    assert keys == [full_decode_key(4), *mixed_keys(64, FEW_REQUESTS), *mixed_keys(2, 8)]
    assert all(key.kind.runtime_mode is Mode.FULL for key in keys)
    assert piecewise_key(64).kind.runtime_mode is Mode.PIECEWISE


def test_graphs_of_steps_with_prompts_have_room_for_few_requests_many_or_all():
    def rooms(num_tokens, max_num_seqs):
        return [key.graph_bs for key in mixed_keys(num_tokens, max_num_seqs)]

    assert rooms(1, 256) == []
    assert rooms(2, 256) == [1]
    assert rooms(2048, 8) == [8]
    assert rooms(64, 256) == [63]
    assert rooms(128, 256) == [127, FEW_REQUESTS]
    assert rooms(2048, 256) == [256, FEW_REQUESTS]
    assert rooms(512, 512) == [511, FEW_REQUESTS]
    assert rooms(2048, 512) == [512, MANY_REQUESTS, FEW_REQUESTS]


def test_only_what_the_mode_runs_is_planned():
    sizes = {"decode_sizes": (1, 4), "token_sizes": (8,), "max_num_seqs": 4}
    assert planned_keys(Mode.NONE, **sizes) == []
    assert planned_keys(Mode.PIECEWISE, **sizes) == [piecewise_key(8)]
    decodes = planned_keys(Mode.FULL_DECODE_ONLY, **sizes)
    assert [key.kind for key in decodes] == [GraphKind.DECODE] * 2


def test_decodes_with_drafts_have_several_query_tokens():
    keys = planned_keys(
        Mode.FULL_DECODE_ONLY,
        decode_sizes=(1, 4),
        token_sizes=(),
        max_num_seqs=4,
        decode_q_lens=(3,),
    )
    assert keys == [full_decode_key(4, 3), full_decode_key(1, 3)]
    assert (keys[0].num_tokens, keys[0].graph_bs, keys[0].max_q_len) == (12, 4, 3)


def test_drafting_follows_the_graphs_of_its_steps_and_pieces_have_none():
    sizes = {"decode_sizes": (1, 4), "token_sizes": (8,), "max_num_seqs": 4}
    keys = with_draft_keys(planned_keys(Mode.FULL_AND_PIECEWISE, **sizes, decode_q_lens=(3,)))
    whole = [full_decode_key(4, 3), full_decode_key(1, 3)]
    drafts = [replace(key, kind=GraphKind.DRAFT) for key in whole]
    assert keys == [*whole, *drafts, piecewise_key(8)]
    assert with_draft_keys([piecewise_key(8)]) == [piecewise_key(8)]


def test_all_forms_of_a_decode_graph_share_one_of_drafts():
    plain = full_decode_key(4, 3)
    forms = [replace(plain, shares_prefixes=True), replace(plain, skips_adapters=True)]
    drafts = [replace(plain, kind=GraphKind.DRAFT)]
    assert with_draft_keys([*forms, piecewise_key(8)]) == [*forms, *drafts, piecewise_key(8)]


@pytest.mark.parametrize(
    ("attention", "q_len", "mode", "reason"),
    [
        (Support.ALWAYS, 3, Mode.FULL, ""),
        (Support.UNIFORM_BATCH, 1, Mode.FULL_AND_PIECEWISE, "graphs of steps with prompts need"),
        (Support.UNIFORM_BATCH, 3, Mode.FULL_AND_PIECEWISE, "graphs of steps with prompts need"),
        (Support.UNIFORM_SINGLE_TOKEN_DECODE, 1, Mode.FULL_AND_PIECEWISE, "need ALWAYS"),
        (Support.UNIFORM_SINGLE_TOKEN_DECODE, 3, Mode.PIECEWISE, "with 3 tokens per request need"),
        (Support.NEVER, 1, Mode.PIECEWISE, "need UNIFORM_SINGLE_TOKEN_DECODE"),
    ],
)
def test_attention_decides_which_whole_graphs_there_are(attention, q_len, mode, reason):
    support = graph_support(
        attention, CompilationLevel.NO_COMPILATION, decode_q_len=q_len, on_cpu=False
    )
    choice = supported_mode(Mode.FULL, support)
    assert choice.mode is mode
    assert reason in choice.reason
    if mode is not Mode.FULL:
        assert choice.reason.startswith(f"FULL became {mode}: attention supports {attention.name}")
