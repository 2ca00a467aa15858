"""Checkpoints whose sizes all quantised formats take."""

import pytest

from tests.support.quantized_checkpoints import WIDE, WIDE_EXPERTS
from tests.support.random_checkpoints import write_checkpoint


@pytest.fixture(scope="module")
def wide_source(tmp_path_factory):
    """Returns a function from a family to a random checkpoint of it."""
    folders = {}

    def wide_source(variant, **sizes):
        key = variant, *sizes.items()
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp(variant)
            write_checkpoint(folders[key], variant, **WIDE | WIDE_EXPERTS.get(variant, {}) | sizes)
        return folders[key]

    return wide_source
