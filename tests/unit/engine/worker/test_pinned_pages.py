import pytest

from services.engine.worker.pinned_pages import PinnedPages


def test_memory_that_the_system_refuses_is_an_error_that_lets_an_engine_stay_awake():
    with pytest.raises(MemoryError, match="the system refuses 1073741824"):
        PinnedPages(2**60)
