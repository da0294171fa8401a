"""Tests of a user. Which fail, and about which target, is in the test that runs them."""

import attention
import pytest

import mhacli


def test_right():
    assert mhacli.check(attention.right).ok


def test_wrong():
    assert mhacli.check(attention.without_scale).ok


def test_wrong_with_a_name_and_a_message():
    right, report = mhacli.check(attention.right), mhacli.check(attention.without_scale)
    assert report.ok, "it is not"
    assert right.ok


def test_asserted():
    mhacli.assert_right(attention.without_scale)


def test_what_is_found():
    report = mhacli.check(attention.without_scale)
    assert not report.ok
    assert report.findings[0].code == "causal-missing"


@pytest.mark.xfail
def test_known():
    assert mhacli.check(attention.without_scale).ok


@pytest.fixture
def model():
    assert mhacli.check(attention.without_scale).ok


def test_prepared(model):
    pass
