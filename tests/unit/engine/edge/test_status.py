"""The table from errors to gRPC statuses."""

import grpc

from services.engine import errors
from services.engine.core.stats import Counters
from services.engine.edge.status import STATUS_CODES, count_rejection, failure_of, status_of


def test_every_error_has_a_status():
    assert set(errors.EngineError.__subclasses__()) == set(STATUS_CODES)


def test_a_full_queue_says_when_to_try_again():
    status = status_of(errors.QueueFullError("full", retry_after_ms=250))
    assert status.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert status.trailing_metadata == (("grpc-retry-pushback-ms", "250"),)


def test_our_own_bugs_have_no_status():
    assert status_of(KeyError("x")) is None


def test_a_failure_carries_code_text_and_pushback():
    failure = failure_of(errors.QueueFullError("full", retry_after_ms=250))
    assert (failure.code, failure.message, failure.retry_after_ms) == (8, "full", 250)
    assert not failure_of(errors.InvalidRequestError("bad")).HasField("retry_after_ms")


def test_rejections_are_counted_by_status_name():
    counters = Counters()
    count_rejection(counters, errors.InvalidRequestError("bad"))
    assert counters.rejected == {"INVALID_ARGUMENT": 1}


def test_a_failure_names_the_field_that_is_to_blame():
    assert failure_of(errors.InvalidRequestError("bad", field="logit_bias")).field == "logit_bias"
    assert failure_of(errors.InvalidRequestError("bad")).field == ""
