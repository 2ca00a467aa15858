from services.engine.worker.__main__ import begin_to_open


def test_a_worker_on_a_cpu_opens_no_gpu():
    assert begin_to_open("cpu", 0) is None


def test_a_machine_without_a_gpu_is_left_to_torch_to_complain_of():
    opening = begin_to_open("auto", 1000)
    opening.join(60)
    assert not opening.is_alive()
