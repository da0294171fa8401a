"""What the installed program draws of hostile texts, and answers to files that it cannot write or pictures that cannot be."""

import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support.hostile import HOSTILE, WEB, escaped, tokenizer_of
from support.processes import WITH_TORCH, Launch, attempt, forms, obeyed_or_hidden

TOKENS = [*HOSTILE, *WEB]
KINDS = ("html", "svg", "png")
SVG = "{http://www.w3.org/2000/svg}"
BINDING = {"script", "iframe", "object", "embed", "link", "base", "form", "foreignObject", "use", "animate", "set", "a"}


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the record of a run over hostile tokens, and one without matrices."""
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "tokenizer.json").write_text(tokenizer_of(TOKENS))
    (folder / "text.txt").write_text(" ".join(TOKENS))
    words = [
        "run",
        "--file",
        "text.txt",
        "--tokenizer",
        "tokenizer.json",
        "--heads",
        "2",
        "--repeat",
        "1",
        "--view",
        "none",
    ]
    attempt(folder, *words, "--save", "record", writes={"record"}, launch=Launch(WITH_TORCH))
    attempt(folder, *words, "--save", "bare", "--keep", "z", writes={"bare"}, launch=Launch(WITH_TORCH))
    attempt(folder, *words, "--save", "other", "--seed", "1", writes={"other"}, launch=Launch(WITH_TORCH))
    (folder / "link").symlink_to("record")
    return folder


def shown(token: str) -> str:
    """A token as pictures show it: a mark that has nothing to combine with stands on a circle."""
    return ("◌" if token.startswith("\u0301") else "") + escaped(token)


@pytest.mark.parametrize(("picture", "keeps_values"), [("page.html", True), ("figure.svg", False)])
def test_a_run_with_a_page_keeps_the_values_that_its_cells_add(
    picture: str, keeps_values: bool, tmp_path: Path
) -> None:
    kind = Path(picture).suffix[1:]
    words = ("run", "a b", "--heads", "2", "--repeat", "1", f"--{kind}", picture)
    done = attempt(tmp_path, *words, writes={picture}, launch=Launch(WITH_TORCH), form=("--json",))
    assert ("v" in json.loads(done.stdout)) is keeps_values


class Page(HTMLParser):
    """The elements and attributes of a page, and what its scripts hold."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.scripts: list[str] = []
        self.text: list[str] = []
        self._in_script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        self._in_script = tag in ("script", "style")
        if self._in_script:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.scripts[-1] += data
        else:
            self.text.append(data)


def test_a_page_of_hostile_tokens_holds_them_as_text_and_runs_only_our_script(hostile: Path) -> None:
    attempt(hostile, "show", "record", "--view", "none", "--html", "p.html", "--force", writes={"p.html"})
    source = (hostile / "p.html").read_text()
    page = Page(source)
    scripts = [own for tag, own in page.elements if tag == "script"]
    assert sorted(own.get("type", "") for own in scripts) == ["", "application/json"]
    assert not [name for _, own in page.elements for name in own if name.startswith("on") or name in ("src", "srcset")]
    assert not [own for _, own in page.elements if "://" in own.get("href", "") or "javascript:" in str(own)]
    policy = next(own["content"] for tag, own in page.elements if own.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy.split("script-src", 1)[1].split(";")[0]
    held = next(json.loads(text) for text in page.scripts if text.startswith("{"))
    assert [shown(token) for token in TOKENS] in held["texts"]
    assert not [c for c in source if obeyed_or_hidden(c) and c != "\n"]
    assert not {"img", "iframe", "b", "object", "link"} & {tag for tag, _ in page.elements}


@pytest.mark.parametrize("figure", ["head", "grid", "walk"])
def test_a_picture_of_hostile_tokens_holds_them_as_text(hostile: Path, figure: str) -> None:
    words = ["--head", "0"] if figure == "head" else []
    words += ["--svg", "p.svg", "--figure", figure, "--force"]
    attempt(hostile, "show", "record", "--view", "none", *words, writes={"p.svg"})
    source = (hostile / "p.svg").read_text()
    root = ElementTree.fromstring(source)
    tags = {element.tag.removeprefix(SVG) for element in root.iter()}
    assert not tags & BINDING
    for element in root.iter():
        for name, value in element.attrib.items():
            assert not name.startswith("on")
            assert not re.search(r"(https?|javascript):", value) or value.startswith("http://www.w3.org/"), (
                name,
                value,
            )
    assert not [c for c in source if obeyed_or_hidden(c) and c != "\n"]
    if figure == "head":
        said = "\n".join(text for element in root.iter() for text in (element.text or "",))
        for token in TOKENS:
            assert shown(token)[:8] in said


def test_the_same_record_gives_the_same_bytes(hostile: Path) -> None:
    def drawn(name: str) -> list[bytes]:
        words = [word for kind in KINDS for word in (f"--{kind}", f"{name}.{kind}")]
        attempt(hostile, "show", "record", "--view", "none", *words, writes={f"{name}.{kind}" for kind in KINDS})
        return [(hostile / f"{name}.{kind}").read_bytes() for kind in KINDS]

    assert drawn("once") == drawn("again")


def test_a_run_and_the_record_that_it_saved_give_the_same_page_and_picture(tmp_path: Path) -> None:
    words = ["run", "the cat sat", "--heads", "2", "--repeat", "1", "--save", "r", "--html", "a.html", "--svg", "a.svg"]
    done = attempt(tmp_path, *words, writes={"r", "a.html", "a.svg"}, launch=Launch(WITH_TORCH))
    assert re.search(r"^mha: saved a\.html, [\d.]+ KiB$", done.stderr, re.MULTILINE)
    attempt(tmp_path, "show", "r", "--html", "b.html", "--svg", "b.svg", writes={"b.html", "b.svg"})
    for kind in ("html", "svg"):
        assert (tmp_path / f"a.{kind}").read_bytes() == (tmp_path / f"b.{kind}").read_bytes()


@forms
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_exists_is_kept_unless_forced(hostile: Path, kind: str, form: tuple[str, ...]) -> None:
    target = hostile / f"kept.{kind}"
    target.write_text("mine")
    target.chmod(0o600)
    words = ["show", "record", "--view", "none", f"--{kind}", target.name]
    attempt(hostile, *words, code=1, form=form, says=[target.name, "exists", "--force"])
    attempt(hostile, *words, "--force", form=form, writes={target.name})
    assert target.stat().st_size > 1000
    assert target.stat().st_mode & 0o777 == 0o600


@forms
def test_places_that_cannot_be_written_are_refused(hostile: Path, form: tuple[str, ...]) -> None:
    (hostile / "folder").mkdir(exist_ok=True)
    for target, says in (("folder", "folder"), ("nowhere/p", "nowhere"), ("", "empty")):
        attempt(hostile, "show", "record", "--html", target, code=1, form=form, says=[says])
    if not (hostile / "pipe").exists():
        os.mkfifo(hostile / "pipe")
    attempt(hostile, "show", "record", "--svg", "pipe", "--force", code=1, form=form, says=["pipe"])


@forms
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--html", "x", "--svg", "x"], ["--html and --svg name the same file", "x"]),
        (["--svg", "x", "--png", "./x"], ["--svg and --png", "./x"]),
        (["--html", "record", "--force"], ["record", "--html"]),
        (["--svg", "link", "--force"], ["--svg", "link"]),
        (["--full"], ["--full changes nothing without --html FILE"]),
        (["--figure", "grid"], ["--figure ", " --svg or --png FILE"]),
        (["--hide-sinks"], ["--hide-sinks ", " --html, --svg or --png FILE"]),
        (["--map-scale", "log"], ["--map-scale ", " --html, --svg or --png FILE"]),
        (["--svg", "x", "--figure", "cube"], ["figure", "'cube'", "'grid'"]),
        (["--svg", "x", "--head", "7"], ["head", "7"]),
        (["--svg", "x", "--figure", "head"], ["head"]),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--") else "",
)
def test_choices_that_cannot_be_are_usage_errors(
    hostile: Path, words: list[str], says: list[str], form: tuple[str, ...]
) -> None:
    attempt(hostile, "show", "record", "--view", "none", *words, code=2, form=form, says=says)


@forms
@pytest.mark.parametrize("option", ["--save", "--save-weights"])
def test_a_picture_does_not_replace_what_the_same_command_saves(
    tmp_path: Path, option: str, form: tuple[str, ...]
) -> None:
    words = ["run", "the cat", option, "r", "--html", "./r", "--force"]
    attempt(tmp_path, *words, code=2, form=form, says=[option, "--html"])


@forms
def test_a_picture_of_patterns_that_are_not_kept_is_refused_before_anything_is_computed(
    tmp_path: Path, form: tuple[str, ...]
) -> None:
    words = ["run", "the cat", "--keep", "z,out"]
    attempt(
        tmp_path,
        *words,
        "--svg",
        "p.svg",
        code=2,
        form=form,
        says=["--keep z,out lacks the pattern", "--keep pattern,z,out"],
    )
    walk = ["--svg", "p.svg", "--figure", "walk"]
    attempt(tmp_path, *words, *walk, form=form, writes={"p.svg"}, launch=Launch(WITH_TORCH))


@forms
def test_a_record_without_matrices_has_a_page_that_says_so_and_no_picture_of_heads(
    hostile: Path, form: tuple[str, ...]
) -> None:
    attempt(hostile, "show", "bare", "--view", "none", "--svg", "bare.svg", code=1, form=form, says=["pattern"])
    assert not (hostile / "bare.svg").exists()
    attempt(hostile, "show", "bare", "--html", "bare.html", "--force", form=form, writes={"bare.html"})
    assert "<code>--keep</code> pattern" in (hostile / "bare.html").read_text()
    attempt(hostile, "show", "bare", "--svg", "w.svg", "--figure", "walk", "--force", form=form, writes={"w.svg"})


@forms
def test_a_comparison_of_hostile_tokens_shows_them_as_escapes(hostile: Path, form: tuple[str, ...]) -> None:
    done = attempt(hostile, "diff", "record", "other", "--head", "0", "--all", code=3, form=form)
    assert len(done.stdout) > 1000
    if not form:
        assert escaped(HOSTILE[0])[:7] in done.stdout
    attempt(hostile, "diff", "record", "record", form=form)


def test_the_viewer_needs_a_terminal(hostile: Path) -> None:
    attempt(hostile, "view", "record", code=1, says=["terminal", "mha show"])
