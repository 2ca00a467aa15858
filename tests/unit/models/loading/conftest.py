"""Checkpoints whose sizes all quantised formats take."""

import pytest

from tests.support.quantized_checkpoints import WIDE, WIDE_EXPERTS, WIDE_STATES
from tests.support.random_checkpoints import write_checkpoint


@pytest.fixture(scope="module")
def wide_source(tmp_path_factory):
    """Returns a function from a family to a random checkpoint of it."""
    folders = {}

    def wide_source(variant, **sizes):
        key = variant, *sizes.items()
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp(variant)
            own = (WIDE_EXPERTS | WIDE_STATES).get(variant, {})
            write_checkpoint(folders[key], variant, **WIDE | own | sizes)
        return folders[key]

    return wide_source
