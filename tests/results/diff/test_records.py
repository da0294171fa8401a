"""`mhacli.diff`: the document of the command, for records and for their files."""

import json

import pytest
from support.records import make_record

import mhacli
from mhacli.errors import UsageError
from mhacli.render.diff.json import json_pieces
from mhacli.results.diff.compare import compare


def test_the_document_is_that_of_the_command() -> None:
    a, b = make_record(seed=0), make_record(seed=1)
    expected = json.loads("".join(json_pieces(compare(a, b), (a, b), ("the first record", "the second record"), ())))
    found = mhacli.diff(a, b)
    assert found.to_dict() == expected
    assert (found.verdict, found.summary) == (expected["verdict"], expected["summary"]) == ("differ", found.summary)


def test_files_and_records_give_the_same_differences(tmp_path) -> None:
    a, b = make_record(seed=0), make_record(seed=1)
    paths = [str(tmp_path / name) for name in ("a.safetensors", "b.safetensors")]
    for record, path in zip((a, b), paths, strict=True):
        record.save(path)
    found = mhacli.diff(*paths)
    assert found.names == tuple(paths)
    assert found.to_dict()["layers"] == mhacli.diff(a, b).to_dict()["layers"]


def test_a_record_agrees_with_itself_and_the_tolerance_is_obeyed() -> None:
    a = make_record(seed=0)
    assert mhacli.diff(a, a, tolerance=0).verdict == "agree"
    assert mhacli.diff(a, make_record(seed=1), tolerance=1e6).verdict == "agree"
    with pytest.raises(UsageError):
        mhacli.diff(a, a, tolerance=-1)


def test_the_differences_show_themselves() -> None:
    found = mhacli.diff(make_record(seed=0), make_record(seed=1))
    assert repr(found) == f"<RecordDiff: {found.summary}>"
    html = found._repr_html_()
    assert found.summary in html
    assert len(html) < 200_000
    assert "<script" not in html
