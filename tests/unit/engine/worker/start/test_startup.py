from services.engine.worker.start.startup import StageClock


def test_stages_follow_each_other_and_add_up_to_the_start():
    times = iter([10.0, 11.5, 11.75])
    clock = StageClock(clock=lambda: next(times))
    clock.end("load")
    clock.end("kernels")
    assert clock.seconds() == {"start_s": 1.75, "load_s": 1.5, "kernels_s": 0.25}
