from collections.abc import Sequence
from dataclasses import replace

from support.scans import SETTINGS

from mhacli.results.scan.settings import ScanSettings
from mhacli.results.scan.unit import Unit, units
from mhacli.text.corpus import BadDocument, Document

DOCUMENTS = [Document("a.txt", place, f"text {place}") for place in range(1, 8)]


def names(documents: Sequence[Document | BadDocument], settings: ScanSettings = SETTINGS) -> list[str]:
    return [unit.name for unit in units(documents, settings.digest, 3)]


def test_units_are_consecutive_documents_and_the_last_has_the_rest() -> None:
    made = [*units(iter(DOCUMENTS), SETTINGS.digest, 3)]
    assert [(unit.number, len(unit.documents)) for unit in made] == [(0, 3), (1, 3), (2, 1)]
    assert [document for unit in made for document in unit.documents] == DOCUMENTS
    assert all(isinstance(unit, Unit) for unit in made)


def test_the_names_of_units_sort_as_their_documents_stand() -> None:
    made = names(DOCUMENTS * 5)
    assert made == sorted(made)
    assert len(set(made)) == len(made)


def test_a_name_changes_with_a_document_its_place_and_the_settings_and_with_nothing_else() -> None:
    one = DOCUMENTS[1]
    for changed in (
        one._replace(text="other"),
        one._replace(place=9),
        one._replace(file="b.txt"),
        BadDocument(*one),
    ):
        others = names([DOCUMENTS[0], changed, *DOCUMENTS[2:]])
        assert others[0] != names(DOCUMENTS)[0]
        assert others[1:] == names(DOCUMENTS)[1:]
    assert not set(names(DOCUMENTS)) & set(names(DOCUMENTS, replace(SETTINGS, max_tokens=9)))
    assert names(DOCUMENTS) == names(DOCUMENTS, replace(SETTINGS, model="another/path/of/the/same"))


def test_words_that_stand_together_are_not_taken_for_others() -> None:
    assert names([Document("a", 1, "b")]) != names([Document("a", 1, "b\0")])
    assert names([Document("a\0b", 1, "")]) != names([Document("a", 1, "b\0")])


def test_an_empty_corpus_has_no_units() -> None:
    assert names([]) == []
