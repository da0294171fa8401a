import pytest
import torch

from mhacli.compute.scan.engines.ranks import Share, on_own_gpu, share_here
from mhacli.errors import UsageError
from mhacli.requests.scan import ScanRequest


def begin(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_a_rank_has_its_share_and_another_process_none(monkeypatch: pytest.MonkeyPatch) -> None:
    begin(monkeypatch, RANK="1", WORLD_SIZE="3")
    assert share_here() == Share(1, 3)
    begin(monkeypatch, WORLD_SIZE="3")
    assert share_here() is None


@pytest.mark.parametrize(("rank", "world_size"), [("2", "2"), ("-1", "2"), ("x", "2"), ("0", ""), ("0", "0")])
def test_ranks_that_cannot_be_are_refused(monkeypatch: pytest.MonkeyPatch, rank: str, world_size: str) -> None:
    begin(monkeypatch, RANK=rank, WORLD_SIZE=world_size)
    with pytest.raises(UsageError):
        share_here()


@pytest.mark.parametrize(
    ("device", "n_gpus", "local", "expected"),
    [
        ("auto", 4, "3", "cuda:3"),
        ("cuda", 4, "5", "cuda:1"),
        ("auto", 1, "3", "auto"),
        ("auto", 4, "", "auto"),
        ("cpu", 4, "3", "cpu"),
        ("cuda:0", 4, "3", "cuda:0"),
    ],
)
def test_each_rank_of_a_machine_takes_its_own_gpu(
    monkeypatch: pytest.MonkeyPatch, device: str, n_gpus: int, local: str, expected: str
) -> None:
    begin(monkeypatch, LOCAL_RANK=local)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n_gpus)
    assert on_own_gpu(ScanRequest("model", device=device)).device == expected
