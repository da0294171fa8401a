"""Tiny checkpoints for the scans of a file of tests."""

from __future__ import annotations

import pytest
from support.checkpoints_saved import Checkpoints


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def model(checkpoints: Checkpoints) -> str:
    return checkpoints.of("gpt2")
