"""Data-parallel ranks are planned together: one order of steps, requests spread over the ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.engine.batch import FallbackReason, GraphKey, GraphKind, read_int32
from services.engine.errors import InvalidRequestError, QueueFullError
from services.engine.kv_cache.prefix_journal import JointPrefixJournal
from services.engine.request import RequestStatus
from services.engine.scheduler.dispatcher import BatchShape, GraphDispatcher
from services.engine.scheduler.recovery import lose_worker
from tests.support.block_replica import BlockReplica
from tests.support.data_parallel_rig import BLOCK_SIZE, DataParallelRig
from tests.support.fake_worker import expected_output
from tests.support.requests import make_request

DECODE_4 = GraphKey(kind=GraphKind.GRAPH_KIND_DECODE, num_tokens=4, graph_bs=4, max_q_len=1)
SIZES_8 = {"kind": GraphKind.GRAPH_KIND_DECODE, "num_tokens": 8, "graph_bs": 8, "max_q_len": 1}
DECODE_8 = GraphKey(**SIZES_8)
MIXED_16 = GraphKey(kind=GraphKind.GRAPH_KIND_MIXED, num_tokens=16, graph_bs=4, max_q_len=16)


def ranks_of(*requests):
    return [request.data_parallel_rank for request in requests]


def num_tokens(step):
    return read_int32(step.descriptor.dp_metadata.num_tokens_across_dp).tolist()


def expected(request):
    return expected_output(request.prompt_token_ids, request.sampling)


def test_requests_are_spread_over_the_ranks():
    rig = DataParallelRig()
    requests = [make_request(8) for _ in range(6)]
    rig.add(*requests)
    assert ranks_of(*requests) == [0, 1] * 3


def test_a_request_goes_where_most_blocks_stay_free():
    rig = DataParallelRig()
    long, *short = make_request(40), *(make_request(8) for _ in range(4))
    rig.add(long, *short)
    assert ranks_of(long, *short) == [0, 1, 1, 1, 1]
    rig.run()
    assert [rank.num_free_blocks for rank in rig.ranks] == [32, 32]


def test_a_request_goes_to_the_rank_that_has_its_prefix():
    rig = DataParallelRig()
    other, first = make_request(8), make_request(list(range(30)))
    rig.add(other, first)
    rig.run()
    again = make_request([*range(30), 7])
    rig.add(again)
    rig.run()
    assert first.data_parallel_rank == again.data_parallel_rank == 1
    assert again.num_cached_tokens == 28


def test_a_short_common_prefix_does_not_bring_all_requests_to_one_rank():
    rig = DataParallelRig(max_num_waiting=32)
    system = list(range(BLOCK_SIZE))
    rig.add(make_request(system))
    rig.run()
    requests = [make_request([*system, 100 + number] * 2) for number in range(10)]
    rig.add(*requests)
    assert 4 <= sum(ranks_of(*requests)) <= 6


def test_a_rank_without_requests_gets_idle_steps():
    rig = DataParallelRig(3)
    request = make_request(8, max_tokens=3)
    rig.add(request)
    step = rig.send()
    assert num_tokens(step) == [8, 0, 0]
    assert [part.descriptor.context.batch_size for part in step.others] == [0, 0]
    rig.run()
    assert request.sink.token_ids == expected(request)
    assert rig.scheduler.schedule() is None


def test_a_graph_fits_every_rank_or_none_has_one():
    dispatcher = GraphDispatcher([DECODE_4, MIXED_16])
    rig = DataParallelRig(dispatcher=dispatcher)
    rig.add(make_request(3), make_request(5))
    assert rig.send().descriptor.graph_key == MIXED_16
    assert rig.send().descriptor.graph_key == DECODE_4
    rig.add(make_request(9))
    mixed = rig.send()  # one rank has a prompt, the other decodes
    assert num_tokens(mixed) == [10, 1]
    assert mixed.others[0].descriptor.graph_key == MIXED_16
    dispatcher.quarantine(MIXED_16)
    rig.add(make_request(9))
    step = rig.send()
    for part in (step, *step.others):
        assert not part.descriptor.HasField("graph_key")
        assert part.descriptor.fallback_reason == FallbackReason.FALLBACK_REASON_QUARANTINED
    rig.run()


def test_the_limit_of_waiting_requests_is_that_of_all_ranks():
    rig = DataParallelRig(max_num_waiting=3)
    rig.add(*(make_request(4) for _ in range(3)))
    with pytest.raises(QueueFullError, match="3 requests wait"):
        rig.add(make_request(4))


def test_an_abort_ends_the_request_of_its_rank():
    rig = DataParallelRig()
    first, second = make_request(8), make_request(8)
    rig.add(first, second)
    rig.send()
    assert rig.scheduler.abort(second)
    assert second.status is RequestStatus.FINISHED
    rig.run()
    assert first.sink.token_ids == expected(first)
    assert [rank.num_free_blocks for rank in rig.ranks] == [32, 32]


def test_suspects_run_alone_on_all_ranks():
    rig = DataParallelRig()
    suspects = [make_request(8, max_tokens=3) for _ in range(2)]
    other = make_request(8, max_tokens=3)
    for request in (*suspects, other):
        request.max_num_tokens = 11
    for suspect in suspects:
        lose_worker(suspect, was_killed=False)
    for request in (other, *suspects):
        rig.scheduler.resume(request)
    while any(suspect.is_suspect for suspect in suspects):
        step = rig.send()
        assert step is not None
        assert len([*step.requests, *step.unsampled]) == 1
        assert num_tokens(step)[1] == 0
        rig.receive()
    rig.run()
    assert all(each.sink.token_ids == expected(each) for each in (*suspects, other))


def test_a_suspect_that_the_cache_is_too_small_for_stops_no_rank():
    rig = DataParallelRig(num_blocks=5)
    suspect = make_request(8, max_tokens=20)
    suspect.max_num_tokens = 28
    lose_worker(suspect, was_killed=False)
    with pytest.raises(InvalidRequestError, match="may reach 28 tokens"):
        rig.scheduler.resume(suspect)
    rig.add(*(make_request(8) for _ in range(2)))
    assert num_tokens(rig.send()) == [8, 8]
    rig.run()


def test_a_shortage_of_memory_on_all_ranks_takes_the_step_back():
    rig = DataParallelRig()
    prompt, decoding = make_request(12, max_tokens=4), make_request(1, max_tokens=4)
    rig.add(prompt, decoding)
    for worker in rig.workers:
        worker.memory_tokens = 6
    rig.send()
    rig.send()
    assert rig.receive() == []  # one token of a rank is not to blame for the rows of another's
    assert rig.scheduler.num_batched_tokens_limit == 6
    rig.run()
    assert all(each.sink.token_ids == expected(each) for each in (prompt, decoding))


def test_prefixes_are_those_of_any_rank():
    rig = DataParallelRig()
    same = list(range(8))
    rig.add(make_request(same), make_request(same))
    rig.run()
    changes = rig.scheduler.prefix_changes(None, max_keys=100)
    assert changes.is_reset
    assert len(changes.added) == len(set(changes.added)) >= 2
    rig.add(make_request(40))
    rig.run()
    later = rig.scheduler.prefix_changes(changes.cursor, max_keys=100)
    assert later.added
    assert not later.is_reset


def test_a_key_is_present_while_one_index_has_it():
    journal = JointPrefixJournal()
    cursor = journal.since(None, (), max_keys=9).cursor
    for _ in range(2):
        journal.record(b"key", is_present=True)
    journal.record(b"key", is_present=False)
    assert journal.since(cursor, (), max_keys=9).added == (b"key",)
    journal.record(b"key", is_present=False)
    assert journal.since(cursor, (), max_keys=9).removed == (b"key",)
    assert journal.since(None, (), max_keys=9).added == ()


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    num_ranks=st.integers(2, 4),
    num_blocks=st.integers(9, 12),
    aborted=st.sets(st.integers(0, 11), max_size=3),
)
def test_every_load_is_served_and_leaves_nothing(lengths, num_ranks, num_blocks, aborted):
    rig = DataParallelRig(num_ranks, num_blocks=num_blocks, max_model_len=32, max_num_waiting=12)
    requests = [make_request(length, max_tokens=2 + length % 5) for length in lengths]
    for number, request in enumerate(requests):
        rig.add(request)
        rig.send()
        if number in aborted:
            rig.scheduler.abort(requests[number // 2])
        if len(rig.in_flight) == 2:
            rig.receive()
    rig.run()
    for request in requests:
        output = expected(request)[: 32 - len(request.prompt_token_ids)]
        assert output[: len(request.sink.token_ids)] == request.sink.token_ids
        assert request.status is RequestStatus.FINISHED
    assert {rank.num_free_blocks for rank in rig.ranks} == {num_blocks - 1}


def test_a_decode_graph_fits_only_ranks_whose_requests_have_as_many_tokens():
    wide = GraphKey(kind=GraphKind.GRAPH_KIND_DECODE, num_tokens=8, graph_bs=4, max_q_len=2)
    dispatcher = GraphDispatcher([wide])
    uniform = BatchShape(num_tokens=8, batch_size=4, max_q_len=2)
    smaller = BatchShape(num_tokens=2, batch_size=1, max_q_len=2)
    mixed = BatchShape(num_tokens=3, batch_size=2, max_q_len=2)
    assert dispatcher.dispatch(BatchShape.of_all([uniform, smaller])).graph_key == wide
    assert dispatcher.dispatch(BatchShape.of_all([uniform, mixed])).graph_key is None


def test_while_a_request_of_one_rank_must_wait_no_rank_runs_a_step():
    rig = DataParallelRig(num_speculative_tokens=2, lookup_sizes=(1, 2))
    requests = [make_request([1, 2] * 4, max_tokens=4), make_request([3] * 8, max_tokens=9)]
    rig.add(*requests)
    num_parts = set()
    while rig.scheduler.has_work:
        step = rig.send()
        num_parts.add(sum(bool(part.requests) for part in (step, *step.others)))
        assert rig.send() is None
        rig.receive()
    assert all(each.sink.token_ids == expected(each) for each in requests)
    assert num_parts == {1, 2}


def test_the_ranks_choose_the_number_of_drafts_together():
    rig = DataParallelRig(num_speculative_tokens=3, min_speculative_tokens=0)
    requests = [make_request(8 + number, max_tokens=30) for number in range(3)]
    rig.add(*requests)
    lengths = set()
    while rig.scheduler.has_work:
        step = rig.send()
        if step is not None:
            lengths.add(step.descriptor.spec_decode_metadata.num_next_drafts)
        if step is None or len(rig.in_flight) == 2:
            rig.receive()
    assert lengths == {0, 3}  # measured first
    assert all(each.sink.token_ids == expected(each) for each in requests)


def test_no_rank_makes_drafts_that_no_request_verifies():
    rig = DataParallelRig(num_speculative_tokens=3, min_speculative_tokens=0)
    rig.add(*(make_request(8, max_tokens=9, num_speculative_tokens=0) for _ in range(3)))
    rig.send()
    rig.receive()
    while rig.scheduler.has_work:
        assert rig.send().descriptor.spec_decode_metadata.num_next_drafts == 0
        rig.receive()


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    num_drafts=st.integers(1, 3),
    num_ranks=st.integers(2, 3),
    num_blocks=st.integers(9, 12),
    aborted=st.sets(st.integers(0, 11), max_size=3),
)
def test_every_load_is_served_with_drafts(lengths, num_drafts, num_ranks, num_blocks, aborted):
    rig = DataParallelRig(
        num_ranks,
        num_blocks=num_blocks,
        max_model_len=32,
        max_num_waiting=12,
        num_speculative_tokens=num_drafts,
    )
    requests = [make_request(length, max_tokens=2 + length % 5) for length in lengths]
    for number, request in enumerate(requests):
        rig.add(request)
        rig.send()
        if number in aborted:
            rig.scheduler.abort(requests[number // 2])
        if len(rig.in_flight) == 2:
            rig.receive()
    rig.run()
    for request in requests:
        output = expected(request)[: 32 - len(request.prompt_token_ids)]
        assert output[: len(request.sink.token_ids)] == request.sink.token_ids
        assert request.status is RequestStatus.FINISHED
    assert {rank.num_free_blocks for rank in rig.ranks} == {num_blocks - 1}


def test_each_rank_tells_its_own_blocks():
    rig = DataParallelRig()
    rig.add(*(make_request(20) for _ in range(3)))
    rig.run()
    replicas = [BlockReplica() for _ in rig.events]
    for replica, record in zip(replicas, rig.events, strict=True):
        replica.read(record)
        replica.check_contents(4)
    together = rig.scheduler.prefix_changes(None, max_keys=100).added
    assert all(replica.keys() for replica in replicas)
    assert replicas[0].keys() | replicas[1].keys() == set(together)


def test_each_rank_shares_the_prefixes_of_its_own_requests():
    dispatcher = GraphDispatcher([DECODE_8])
    rig = DataParallelRig(
        dispatcher=dispatcher, max_num_seqs=8, max_num_batched_tokens=64, max_num_waiting=32,
        num_blocks=99, shared_prefix_tokens=8,
    )  # fmt: skip
    system = list(range(9))
    rig.add(make_request(system))
    rig.run()
    alike = [make_request([*system, 20 + number], max_tokens=9) for number in range(5)]
    for request in alike:
        rig.ranks[0].add(request)
    rig.ranks[1].add(make_request(8, max_tokens=9))
    keys = set()
    for number in range(6):
        if number == 3:
            dispatcher.capture(GraphKey(shares_prefixes=True, **SIZES_8))
        step = rig.send()
        parts = [part.descriptor for part in (step, *step.others)]
        shares = [bool(part.attn_metadata.shared_prefixes.counts) for part in parts]
        keys.add((*shares, *(part.graph_key.shares_prefixes for part in parts)))
        assert number == 0 or {part.graph_key.graph_bs for part in parts} == {8}
        rig.receive()
    assert keys >= {(True, False, False, False), (True, False, True, False)}


def test_all_ranks_leave_adapters_out_or_none_does():
    free = {"skips_adapters": True, **SIZES_8}
    dispatcher = GraphDispatcher([DECODE_8, GraphKey(shares_prefixes=True, **free)])
    rig = DataParallelRig(
        dispatcher=dispatcher, max_num_seqs=8, max_num_batched_tokens=64, max_num_waiting=32,
        num_blocks=99, shared_prefix_tokens=8, num_adapter_slots=1, shares_slots=True,
    )  # fmt: skip
    system = list(range(9))
    rig.add(make_request(system))
    rig.run()
    for number in range(5):
        rig.ranks[0].add(make_request([*system, 20 + number], max_tokens=9))
    rig.ranks[1].add(make_request(8, max_tokens=9))
    forms = set()
    for number in range(6):
        if number == 3:
            dispatcher.capture(GraphKey(**free))
        step = rig.send()
        keys = [part.descriptor.graph_key for part in (step, *step.others)]
        forms.add(tuple((key.shares_prefixes, key.skips_adapters) for key in keys))
        rig.receive()
    assert forms >= {((False, False), (False, False)), ((True, True), (False, True))}
    assert all(first[1] == second[1] for first, second in forms if first or second)
