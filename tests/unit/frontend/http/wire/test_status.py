"""Every error has an HTTP status."""

from services.frontend.errors import FrontendError
from services.frontend.http.wire.status import STATUSES


def test_no_error_is_without_a_status():
    assert set(STATUSES) == set(FrontendError.__subclasses__())
