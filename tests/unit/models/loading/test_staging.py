"""The limit on bytes that are on their way to a device."""

import contextlib
import threading

from models.loading.staging import BytesInFlight


def test_what_fits_goes_together_and_the_rest_waits():
    in_flight = BytesInFlight(10)
    third_is_in = threading.Event()

    def take_third():
        with in_flight.take(5):
            third_is_in.set()

    thread = threading.Thread(target=take_third)
    with in_flight.take(4):
        with in_flight.take(6):
            thread.start()
            assert not third_is_in.wait(0.05)
        assert third_is_in.wait(60)
    thread.join()


def test_what_is_larger_than_the_limit_goes_alone():
    with BytesInFlight(10).take(1000):
        pass


def test_bytes_are_given_back_after_an_error():
    in_flight = BytesInFlight(10)
    for _ in range(2):
        with contextlib.suppress(IndexError), in_flight.take(10):
            [].pop()
