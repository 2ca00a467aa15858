"""How the outputs of steps become one message."""

import numpy as np

from services.engine.errors import DeadlineExpiredError
from services.engine.request import FinishReason, PositionLogprobs, RequestOutput
from services.engine.rpc.step_columns import StepColumns
from tests.support.engine_harness import RecordingSink, make_request


def request(handle):
    made = make_request(RecordingSink())
    made.handle = handle
    return made


def pack(values):
    return np.array(values, "<u4").tobytes()


def unpack(data):
    return np.frombuffer(data, "<u4").tolist()


def test_one_token_each_needs_no_counts():
    columns = StepColumns()
    for handle, token_id in ((7, 70), (2, 20)):
        columns.add(RequestOutput(request(handle), [token_id]))
    step = columns.to_message().step
    assert unpack(step.handles) == [7, 2]
    assert unpack(step.token_ids) == [70, 20]
    assert not step.num_tokens


def test_steps_merge_into_one_entry_per_request():
    columns = StepColumns()
    first, second = request(1), request(2)
    for token_id in (10, 11):
        columns.add(RequestOutput(first, [token_id]))
    columns.add(RequestOutput(second, [20]))
    step = columns.to_message().step
    assert unpack(step.handles) == [1, 2]
    assert unpack(step.num_tokens) == [2, 1]
    assert unpack(step.token_ids) == [10, 11, 20]


def test_columns_of_tokens_merge_with_each_other_and_with_outputs():
    columns = StepColumns()
    most = 2**32 - 1
    columns.add_tokens(pack([most, 3, 7]), pack([40, 30, 70]))
    columns.add(RequestOutput(request(7), [71, 72]))
    columns.add_tokens(pack([3, most]), pack([31, 41]))
    columns.add(RequestOutput(request(5), [50]))
    assert columns.num_bytes == 12 * 8
    step = columns.to_message().step
    tokens, expected = iter(unpack(step.token_ids)), {3: [30, 31], 7: [70, 71, 72], 5: [50]}
    counts = zip(unpack(step.handles), unpack(step.num_tokens), strict=True)
    found = {handle: [next(tokens) for _ in range(count)] for handle, count in counts}
    assert found == expected | {most: [40, 41]}


def test_a_column_of_one_step_is_sent_as_it_is():
    columns = StepColumns()
    columns.add_tokens(pack([7, 2]), pack([70, 20]))
    step = columns.to_message().step
    assert (unpack(step.handles), unpack(step.token_ids)) == ([7, 2], [70, 20])
    assert not step.num_tokens


def test_a_request_may_end_beside_a_column():
    columns = StepColumns()
    columns.add_tokens(pack([7, 2]), pack([70, 20]))
    columns.add(RequestOutput(request(5), [50], finish_reason=FinishReason.LENGTH))
    step = columns.to_message().step
    assert (unpack(step.handles), unpack(step.token_ids)) == ([7, 2, 5], [70, 20, 50])
    assert [each.handle for each in step.finished] == [5]


def test_an_ending_has_reason_usage_and_stop_token():
    columns = StepColumns()
    ended = request(3)
    columns.add(RequestOutput(ended, [9], finish_reason=FinishReason.STOP, stop_token_id=9))
    (finished,) = columns.to_message().step.finished
    assert (finished.handle, finished.finish_reason, finished.stop_token_id) == (3, 1, 9)
    assert finished.usage.prompt_tokens == 3
    assert columns.has_ending_of(3)


def test_a_failure_has_no_finish_reason():
    columns = StepColumns()
    columns.add(RequestOutput(request(3), [], error=DeadlineExpiredError("too late")))
    step = columns.to_message().step
    assert not step.handles
    assert (step.finished[0].finish_reason, step.finished[0].failure.code) == (0, 4)


def test_log_probabilities_stay_with_their_tokens_when_steps_merge():
    columns = StepColumns()
    asked = request(1)
    for token_id in (10, 11):
        entry = PositionLogprobs(-0.5, (token_id, 5), (-0.5, -1.5))
        columns.add(RequestOutput(asked, [token_id], logprobs=[entry]))
    (entry,) = columns.to_message().step.logprobs
    assert [position.chosen.token_id for position in entry.positions] == [10, 11]
    assert [top.token_id for top in entry.positions[1].top] == [11, 5]


def test_nothing_gathered_is_false():
    assert not StepColumns()
