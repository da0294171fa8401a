"""Ids of checkpoints on a hub."""

from __future__ import annotations

import pytest

from mhacli.requests.checkpoint import is_hub_id


@pytest.mark.parametrize(
    ("source", "is_id"),
    [
        ("gpt2", True),
        ("openai/gpt2", True),
        ("here", False),  # a folder
        ("here/gpt2", False),  # its first folder is here
        ("./gpt2", False),
        ("/models/gpt2", False),
        ("~/gpt2", False),
        ("a/b/c", False),
        ("no spaces", False),
    ],
)
def test_what_is_neither_here_nor_written_as_a_path_can_be_an_id(source, is_id, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert is_hub_id(source) == is_id
