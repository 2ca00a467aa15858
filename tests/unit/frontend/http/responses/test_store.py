"""The store of responses: its limits, its owners, and turns that conversations share."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.frontend.errors import InvalidRequestError, UnknownResponseError
from services.frontend.http.responses.store import (
    OVERHEAD_BYTES,
    ResponseStore,
    StoreLimits,
)


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def make(clock=None, **limits):
    wide = {
        "max_responses": 100, "max_bytes": 2**20, "max_age_s": 60.0,
        "max_conversation_bytes": 2**20, "max_conversation_image_bytes": 2**20,
    }  # fmt: skip
    return ResponseStore(StoreLimits(**(wide | limits)), clock=clock or Clock())


def said(text):
    return [{"role": "user", "content": text}]


def put(store, owner, name, *, previous=None, body=b"{}", text="hi"):
    turn = None if previous is None else store.turn(owner, previous)
    store.put(owner, name, body, said(text), turn)


def ids_of(store, owner, names):
    found = []
    for name in names:
        try:
            store.body(owner, name)
        except UnknownResponseError:
            continue
        found.append(name)
    return found


def test_a_conversation_has_all_its_turns_in_order():
    store = make()
    put(store, "a", "1", text="one")
    put(store, "a", "2", previous="1", text="two")
    put(store, "a", "3", previous="2", text="three")
    put(store, "a", "2b", previous="1", text="branch")
    texts = [m["content"] for m in store.messages_to(store.turn("a", "3"))]
    assert texts == ["one", "two", "three"]
    branch = [m["content"] for m in store.messages_to(store.turn("a", "2b"))]
    assert branch == ["one", "branch"]
    assert store.messages_to(None) == []


def test_later_turns_keep_what_they_need_of_a_response_that_is_gone():
    store = make()
    put(store, "a", "1", text="one")
    put(store, "a", "2", previous="1", text="two")
    store.delete("a", "1")
    assert len(store.messages_to(store.turn("a", "2"))) == 2
    store.delete("a", "2")
    assert (store.num_responses, store.num_bytes) == (0, 0)


def test_a_response_is_its_owners_alone():
    store = make()
    put(store, "a", "1")
    for call in (store.body, store.turn, store.delete):
        with pytest.raises(UnknownResponseError):
            call("b", "1")
    put(store, "b", "1", body=b"other")
    assert (store.body("a", "1"), store.body("b", "1")) == (b"{}", b"other")


def test_the_owner_with_the_most_gives_up_its_oldest():
    store = make(max_responses=4)
    put(store, "quiet", "q")
    for number in range(20):
        put(store, "loud", str(number))
    assert ids_of(store, "quiet", ["q"]) == ["q"]
    assert ids_of(store, "loud", map(str, range(20))) == ["17", "18", "19"]
    by_bytes = make(max_bytes=10_000)
    put(by_bytes, "quiet", "q")
    for number in range(20):
        put(by_bytes, "loud", str(number), body=b"x" * 2000)
    assert ids_of(by_bytes, "quiet", ["q"]) == ["q"]
    assert ids_of(by_bytes, "loud", map(str, range(20))) == ["18", "19"]
    assert by_bytes.num_bytes <= 10_000


def test_what_is_over_the_age_limit_is_forgotten():
    clock = Clock()
    store = make(clock)
    put(store, "a", "1")
    clock.now_s += 30
    put(store, "a", "2", previous="1")
    clock.now_s += 31
    assert ids_of(store, "a", ["1", "2"]) == ["2"]
    assert len(store.messages_to(store.turn("a", "2"))) == 2  # the conversation still lives
    clock.now_s += 30
    store.expire()
    assert (store.num_responses, store.num_bytes) == (0, 0)


def test_a_response_over_the_limit_drives_nothing_out():
    store = make(max_bytes=10_000)
    put(store, "a", "1")
    put(store, "a", "2", body=b"x" * 10_000)
    assert ids_of(store, "a", ["1", "2"]) == ["1"]


def test_a_conversation_over_its_limit_is_refused():
    store = make(max_conversation_bytes=100)
    put(store, "a", "1", text="x" * 40)
    put(store, "a", "2", previous="1", text="x" * 40)
    with pytest.raises(InvalidRequestError, match="the conversation has over"):
        store.messages_to(store.turn("a", "2"))


def test_an_unknown_id_is_shortened_in_the_error():
    with pytest.raises(UnknownResponseError) as caught:
        make().body("a", "x" * 10_000)
    assert len(str(caught.value)) < 300


class StoreMachine(RuleBasedStateMachine):
    """Any order of requests, deletions and time keeps the counts exact and within the limits."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.store = make(self.clock, max_responses=6, max_bytes=12_000, max_age_s=20.0)
        self.num_made = 0
        self.turns = []
        """Turns that requests hold, with their owners, while the store changes."""

    @rule(owner=st.sampled_from("abc"), size=st.integers(0, 5000))
    def begin(self, owner, size):
        self.num_made += 1
        self.store.put(owner, str(self.num_made), b"x" * size, said("hi"), None)

    @precondition(lambda self: self.num_made)
    @rule(owner=st.sampled_from("abc"), data=st.data())
    def look_up(self, owner, data):
        name = str(data.draw(st.integers(1, self.num_made)))
        try:
            self.turns.append((owner, self.store.turn(owner, name)))
        except UnknownResponseError:
            return

    @precondition(lambda self: self.turns)
    @rule(data=st.data(), size=st.integers(0, 5000))
    def go_on(self, data, size):
        owner, turn = data.draw(st.sampled_from(self.turns))
        self.num_made += 1
        self.store.put(owner, str(self.num_made), b"x" * size, said("hi"), turn)

    @precondition(lambda self: self.num_made)
    @rule(owner=st.sampled_from("abc"), data=st.data())
    def delete(self, owner, data):
        name = str(data.draw(st.integers(1, self.num_made)))
        if ids_of(self.store, owner, [name]):
            self.store.delete(owner, name)

    @rule(seconds=st.integers(1, 15))
    def wait(self, seconds):
        self.clock.now_s += seconds
        self.store.expire()

    @invariant()
    def counts_are_exact_and_within_the_limits(self):
        entries = [e for share in self.store._shares.values() for e in share.entries.values()]
        turns = {}
        for entry in entries:
            turn = entry.turn
            while turn is not None:
                turns[id(turn)] = turn
                turn = turn.previous
        held = sum(turn.num_bytes for turn in turns.values())
        assert self.store.num_bytes == held + sum(len(entry.body) for entry in entries)
        assert self.store.num_bytes <= 12_000
        assert self.store.num_responses == len(entries) <= 6
        assert OVERHEAD_BYTES * len(turns) <= held


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
