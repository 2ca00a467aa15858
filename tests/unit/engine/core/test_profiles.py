"""The state of profiles in the service, around a fake worker."""

import pytest

from protos.engine.v1.worker_pb2 import ProfileReport
from services.engine.config.observability import ObservabilityConfig
from services.engine.core.profiles import MAX_TRACES, SUFFIX, Profiles
from services.engine.errors import EngineUnavailableError, ProfileError
from tests.support.engine_harness import engine_config
from tests.support.fake_executor import FakeExecutor


@pytest.fixture
def worker():
    return FakeExecutor(engine_config())


@pytest.fixture
def profiles(tmp_path, worker):
    profiles = Profiles(ObservabilityConfig(profile_dir=tmp_path), "engine")
    profiles.use_worker(worker.order_profile)
    return profiles


async def test_the_engines_limits_hold_where_the_caller_names_none(profiles, worker, tmp_path):
    path = await profiles.start(max_steps=None, max_s=None)
    (order,) = worker.profile_orders
    assert (order.path, order.max_steps, order.max_s) == (str(path), 0, 60)
    assert order.max_bytes == 512 * 2**20
    assert path.parent == tmp_path
    assert (await profiles.stop())[1].num_steps == 3


async def test_a_worker_that_cannot_start_one_says_why_and_may_be_asked_again(profiles, worker):
    worker.profile_error = ProfileReport(error="the trace cannot be written: disk full")
    with pytest.raises(ProfileError, match="disk full"):
        await profiles.start(max_steps=1, max_s=None)
    with pytest.raises(ProfileError, match="no profile is running"):
        await profiles.stop()
    worker.profile_error = None
    await profiles.start(max_steps=1, max_s=None)


async def test_a_full_folder_takes_no_more_traces(profiles, tmp_path):
    for number in range(MAX_TRACES):
        (tmp_path / f"{number}{SUFFIX}").touch()
    with pytest.raises(ProfileError, match="holds 100, which is the limit"):
        await profiles.start(max_steps=1, max_s=None)


async def test_the_loss_of_the_worker_ends_its_profile(profiles):
    await profiles.start(max_steps=None, max_s=1.0)
    profiles.lose_worker()
    with pytest.raises(EngineUnavailableError, match="the worker was lost"):
        await profiles.stop()
    with pytest.raises(EngineUnavailableError, match="is starting"):
        await profiles.start(max_steps=None, max_s=None)
