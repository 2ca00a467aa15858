"""A message's limits are checked on its bytes, at a bounded cost."""

import random

import pytest
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from protos.common.v1.sampling_pb2 import SamplingParams
from protos.frontend.v1 import frontend_pb2 as pb
from services.transport.message_limits import (
    MessageLimits,
    MessageTooLargeError,
    check_message,
    first_number,
)
from tests.support.hostile_messages import HostileMessages

LIMITS = MessageLimits(max_fields=100, max_text_bytes=1000, max_packed_bytes=500)
EMPTY_MESSAGE, UNKNOWN, GROUP, GROUP_END = b"\x12\x00", b"\x78\x00", b"\x7b", b"\x7c"


class CountedBytes(bytes):
    """Counts how often one of its bytes is looked at."""

    def __new__(cls, content):
        """Copies the bytes."""
        made = super().__new__(cls, content)
        made.num_reads = 0
        return made

    def __getitem__(self, index):
        self.num_reads += 1
        return super().__getitem__(index)


def calls(num_messages, num_calls):
    message = pb.ChatMessage(tool_calls=[pb.ToolCall()] * num_calls)
    return pb.ChatRequest(messages=[message] * num_messages).SerializeToString()


def biases(count):
    sampling = SamplingParams(logit_bias=dict.fromkeys(range(count), 1.0))
    return pb.ChatRequest(options=pb.GenerationOptions(sampling=sampling)).SerializeToString()


TOO_MANY = {
    "messages": EMPTY_MESSAGE * 101,
    "deeper messages": calls(20, 5),
    "unknown fields": UNKNOWN * 101,
    "unknown groups": (GROUP + GROUP_END) * 101,
    "groups in groups": GROUP * 101,
    "entries of a map": biases(40),
    "numbers one by one": b"\x0a\xca\x01" + b"\x1a\xc7\x01" + b"\x50\x01" * 101,
    "messages behind bytes that a group hides": GROUP
    + b"\x12\x03\xff\xff\xff"
    + GROUP_END
    + EMPTY_MESSAGE * 101,
}


@pytest.mark.parametrize("data", TOO_MANY.values(), ids=TOO_MANY)
def test_fields_are_counted_wherever_they_are(data):
    with pytest.raises(MessageTooLargeError, match="the message has over 100 fields"):
        check_message(data, pb.ChatRequest, LIMITS)


@pytest.mark.parametrize("part", [EMPTY_MESSAGE, UNKNOWN, GROUP + GROUP_END, calls(1, 50)])
def test_no_message_is_looked_at_beyond_the_limit(part):
    data = CountedBytes(part * (2**20 // len(part)))
    with pytest.raises(MessageTooLargeError):
        check_message(data, pb.ChatRequest, LIMITS)
    assert data.num_reads <= 5 * LIMITS.max_fields


def test_text_and_packed_numbers_cost_one_look_however_long_they_are():
    for message in (
        pb.GenerateRequest(text="x" * 2**20),
        pb.GenerateRequest(tokens=pb.TokenIds(ids=[1] * 2**20)),
    ):
        data = CountedBytes(message.SerializeToString())
        check_message(data, pb.GenerateRequest, MessageLimits())
        assert data.num_reads < 20


def test_text_is_summed_over_all_fields():
    options = pb.GenerationOptions(stop=["x" * 90] * 10)
    check_message(
        pb.GenerateRequest(options=options).SerializeToString(), pb.GenerateRequest, LIMITS
    )
    request = pb.GenerateRequest(text="y" * 101, options=options)
    with pytest.raises(MessageTooLargeError, match="over 1000 bytes of text"):
        check_message(request.SerializeToString(), pb.GenerateRequest, LIMITS)


def test_packed_numbers_are_bounded():
    data = pb.DetokenizeRequest(token_ids=[1] * 501).SerializeToString()
    with pytest.raises(MessageTooLargeError, match="over 500 bytes of numbers"):
        check_message(data, pb.DetokenizeRequest, LIMITS)


def test_a_long_conversation_is_within_the_limits():
    message = pb.ChatMessage(role="user", content="x" * 200)
    data = pb.ChatRequest(messages=[message] * 4096).SerializeToString()
    check_message(data, pb.ChatRequest, MessageLimits())


@pytest.mark.parametrize(
    "data",
    [b"\x12", b"\x12\x05a", b"\x12\xff", b"\x78" + b"\xff" * 11, b"\x7c", b"\x7e", GROUP, b"\xff"],
)
def test_bytes_that_are_no_message_are_left_to_the_parser(data):
    check_message(data, pb.ChatRequest, LIMITS)
    with pytest.raises(DecodeError):
        pb.ChatRequest.FromString(data)


def num_fields(message):
    """Counts what a parsed message holds, at most what its bytes had."""
    count = len(UnknownFieldSet(message))
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            count += 1 if field.message_type is None else len(value)
            continue
        for child in value if field.is_repeated else (value,):
            count += 1 + num_fields(child)
    return count


def test_whatever_parses_has_no_more_fields_than_were_counted():
    hostile = HostileMessages(random.Random(7))
    seed = pb.ChatRequest(
        messages=[pb.ChatMessage(role="user", content="hi", tool_calls=[pb.ToolCall(name="a")])] * 3
    )
    limits = MessageLimits(max_fields=30)
    num_passed = 0
    for _ in range(2000):
        data = hostile.payload(seed)
        try:
            message = pb.ChatRequest.FromString(data)
            check_message(data, pb.ChatRequest, limits)
        except (DecodeError, MessageTooLargeError):
            continue
        num_passed += 1
        assert num_fields(message) <= limits.max_fields, data
    assert num_passed > 100


def test_a_number_is_found_among_the_first_fields_of_bytes_that_are_not_parsed():
    message = pb.SessionRequest(handle=70_000, cancel=pb.Cancel())
    assert first_number(message.SerializeToString(), 1) == 70_000
    assert first_number(b"\x1a\x01a" + b"\x08\x05", 1) == 5
    assert first_number(b"\x1a\x01a", 1) is None
    assert first_number(b"\x78\x00" * 100 + b"\x08\x05", 1) is None
    assert first_number(b"\x08\xff", 1) is None
