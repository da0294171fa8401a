"""What a table names has words, and what is asked is in the table."""

from __future__ import annotations

from mhacli.commands.check.behaviour import TESTS
from mhacli.commands.check.result import CODES
from mhacli.record.glossary import words_of
from mhacli.record.sites import VARIANTS

OF_CHECKPOINTS = ("eager", "row-sums", "bos")


def test_every_behaviour_is_asked_and_the_code_of_its_failure_explained() -> None:
    assert CODES.keys() == {"sees", *TESTS, *OF_CHECKPOINTS}
    words = {**words_of("glossary", "behaviour"), **words_of("mistakes", "mistake")}
    assert {code for code in CODES.values() if code} <= words.keys()


def test_every_variant_has_words() -> None:
    assert VARIANTS.keys() == words_of("glossary", "variant").keys()
