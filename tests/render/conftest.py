"""The browser in which pages and the output of notebooks are opened."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    found = [os.environ.get("MHA_CHROMIUM"), *map(shutil.which, ("chromium-headless-shell", "chromium"))]
    path = next((path for path in found if path and Path(path).exists()), None)
    if path is None:
        pytest.skip("needs chromium, or its path in MHA_CHROMIUM")
    arguments = ["--disable-background-networking", "--no-first-run", "--disable-gpu"]
    arguments += ["--no-sandbox"] if os.geteuid() == 0 else []
    with playwright.sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=path, args=arguments)
        yield launched
        launched.close()
