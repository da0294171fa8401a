"""Finding a target by name, reporting missing names, and reporting exceptions during its import."""

import inspect
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from mhacli.adapters.usercode.target import find_target, is_module_instance, require_readable, split_target
from mhacli.errors import MhaError, UsageError

Write = Callable[..., Path]
PYTHON = shlex.quote(sys.executable)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """`write(path, text)` writes a file in the working directory; its imports are forgotten after the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(path: str, text: str = "") -> Path:
        place = tmp_path / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(dedent(text))
        return place

    yield write
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def refused(target: str) -> MhaError:
    with pytest.raises(MhaError) as caught:
        find_target(target)
    return caught.value


def told(target: str) -> tuple[str, str | None]:
    fault = refused(target)
    assert fault.exit_code == 1
    return fault.message, fault.hint


# ------------------------------------------------------------------------------------------------------- what is found


def test_a_class_of_a_file_is_found_with_its_file(write: Write) -> None:
    path = write("mine.py", "class Attention:\n    def forward(self, x):\n        return x\n")
    found = find_target("mine.py:Attention")
    assert (found.name, found.thing.__name__, found.file) == ("mine.py:Attention", "Attention", str(path))


def test_a_file_finds_its_siblings_and_what_lies_in_the_working_directory(write: Write) -> None:
    write("near_cwd.py", "HERE = 3")
    write("deep/sibling.py", "THERE = 4")
    write(
        "deep/mine.py", "import near_cwd\nfrom sibling import THERE\ndef attend(q):\n    return near_cwd.HERE, THERE\n"
    )
    assert find_target("deep/mine.py:attend").thing(0) == (3, 4)


def test_a_file_of_a_package_imports_relatively_and_its_siblings_by_name_too(write: Write) -> None:
    write("pack/__init__.py")
    write("pack/inner/__init__.py", "")
    write("pack/base.py", "WIDTH = 5")
    write("pack/inner/other.py", "HEADS = 7")
    write(
        "pack/inner/mine.py",
        "from ..base import WIDTH\nfrom other import HEADS\ndef attend():\n    return WIDTH, HEADS\n",
    )
    found = find_target("pack/inner/mine.py:attend").thing
    assert found() == (5, 7)
    assert found.__module__ == "pack.inner.mine"
    assert find_target("pack.inner.mine:attend").thing is found


def test_a_module_is_in_its_place_while_it_runs(write: Write) -> None:
    write(
        "mine.py",
        """
        from __future__ import annotations
        import pickle, sys
        from dataclasses import dataclass
        assert sys.modules[__name__].__name__ == __name__
        @dataclass
        class Sizes:
            n_heads: int = 3
        COPY = pickle.loads(pickle.dumps(Sizes(5)))
        def attend(): return COPY.n_heads
        """,
    )
    assert find_target("mine.py:attend").thing() == 5


def test_two_files_of_one_name_are_two_modules(write: Write) -> None:
    write("a/model.py", "def which(): return 'a'")
    write("b/model.py", "def which(): return 'b'")
    first, second = find_target("a/model.py:which"), find_target("b/model.py:which")
    assert (first.thing(), second.thing()) == ("a", "b")
    assert find_target("a/model.py:which").thing is first.thing


def test_a_file_that_is_called_as_a_library_module_leaves_that_alone(write: Write) -> None:
    write("inspect.py", "class Attention:\n    def forward(self): return 2\n")
    assert find_target("inspect.py:Attention").thing().forward() == 2
    assert sys.modules["inspect"] is inspect


def test_what_runs_is_the_file_not_a_compiled_copy_of_an_earlier_second(write: Write) -> None:
    path = write("mine.py", "def which(): return 1")
    subprocess.run([sys.executable, "-m", "py_compile", path], check=True)
    stamp = path.stat()
    path.write_text("def which(): return 2")
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert find_target("mine.py:which").thing() == 2


def test_nested_names_static_methods_lambdas_partials_and_builtins_are_found(write: Write) -> None:
    path = write(
        "mine.py",
        """
        import functools
        class Outer:
            class Inner:
                def __call__(self): return 'inner'
            @staticmethod
            def attend(q): return q
        small = lambda q: q + 1
        def scaled(q, by): return q * by
        double = functools.partial(scaled, by=2)
        """,
    )
    assert find_target("mine.py:Outer.Inner").thing()() == "inner"
    assert find_target("mine.py:Outer.attend").thing(4) == 4
    assert find_target("mine.py:small").thing(4) == 5
    assert find_target("mine.py:double").thing(4) == 8
    assert find_target("mine.py:double").file == str(path)
    assert find_target("math:sqrt").file is None


def test_an_instance_that_is_built_already_is_found(write: Write) -> None:
    path = write("mine.py", "from torch import nn\nclass A(nn.Linear):\n    pass\nready = A(2, 3)\n")
    found = find_target("mine.py:ready")
    assert is_module_instance(found.thing)
    assert not is_module_instance(type(found.thing))
    assert found.file == str(path)


def test_another_encoding_that_the_file_names_is_read(write: Write) -> None:
    write("mine.py").write_bytes(b"# coding: latin-1\ndef attend(): return '\xe9'\n")
    assert find_target("mine.py:attend").thing() == "é"


# ------------------------------------------------------------------------------------------------ what its author says


def test_the_documentation_is_docstrings_and_comments_of_the_author_alone(write: Write) -> None:
    write(
        "mine.py",
        '''
        """File of mine."""
        from torch import nn
        # not about it
        X = 1
        # above the class
        class Attention(nn.Module):
            """Class of mine."""
            def __init__(self):
                """Makes it."""
                super().__init__()  # inside, behind code
            def forward(self, x):
                """Calls it, causally."""
                # the scale is left out
                return x, "# no comment"  # "# a quoted one"
        class Other:
            """Of another."""
        ''',
    )
    assert find_target("mine.py:Attention").documentation.split("\n\n") == [
        "Class of mine.",
        "Makes it.",
        "Calls it, causally.",
        "# above the class",
        'inside, behind code\nthe scale is left out\n"# a quoted one"',
        "File of mine.",
    ]


def test_the_docstring_of_nn_module_is_no_documentation(write: Write) -> None:
    write("mine.py", "from torch import nn\nclass Attention(nn.Module):\n    def forward(self, x): return x\n")
    assert find_target("mine.py:Attention").documentation == ""


def test_an_inherited_method_is_documented_by_its_base(write: Write) -> None:
    write(
        "mine.py",
        """
        class Base:
            'of the base'
            def forward(self, x):
                'a mask of ones keeps'
        class Attention(Base):
            pass
        """,
    )
    assert find_target("mine.py:Attention").documentation == "a mask of ones keeps"


def test_a_function_is_documented_by_its_docstring_its_comments_and_its_file(write: Write) -> None:
    write("mine.py", "'''A file.'''\ndef attend(q):\n    'Attends.'\n    # slowly\n    return q\n")
    assert find_target("mine.py:attend").documentation == "Attends.\n\nslowly\n\nA file."


# ------------------------------------------------------------------------------------------------------------- the form


@pytest.mark.parametrize(
    ("target", "message", "hint"),
    [
        ("mine.py", "'mine.py' is not of the form FILE.py:NAME or package.module:NAME", "mine.py:Attention"),
        (
            "torch.nn.Linear",
            "'torch.nn.Linear' is not of the form FILE.py:NAME or package.module:NAME",
            "torch.nn:Linear",
        ),
        (
            "attention",
            "'attention' is not of the form FILE.py:NAME or package.module:NAME",
            "FILE.py:NAME or package.module:NAME",
        ),
        (
            "mine.py:",
            "'', after the last colon, is not the name of a class or function",
            "FILE.py:NAME or package.module:NAME",
        ),
        (
            "mine.py:12",
            "'12', after the last colon, is not the name of a class or function",
            "FILE.py:NAME or package.module:NAME",
        ),
        (
            "my-module:A",
            "'my-module', before the last colon, is neither a file nor a module",
            "FILE.py:NAME or package.module:NAME",
        ),
        (":A", "'', before the last colon, is neither a file nor a module", "FILE.py:NAME or package.module:NAME"),
    ],
)
def test_what_is_no_target_is_a_usage_error_with_the_form(write: Write, target: str, message: str, hint: str) -> None:
    write("mine.py", "import nothing_such\nclass Attention: pass\ndef attend(): pass\n")
    with pytest.raises(UsageError) as caught:
        find_target(target)
    assert (caught.value.message, caught.value.hint) == (message, hint)


def test_names_that_the_hint_leaves_out_are_counted(write: Write) -> None:
    write("many.py", "".join(f"class C{n}: pass\n" for n in range(19)))
    with pytest.raises(UsageError) as caught:
        find_target("many.py")
    assert caught.value.hint == "; ".join([*(f"many.py:C{n}" for n in range(12)), "and 7 more"])
    write("twelve.py", "".join(f"class C{n}: pass\n" for n in range(12)))
    with pytest.raises(UsageError) as caught:
        find_target("twelve.py")
    assert caught.value.hint == "; ".join(f"twelve.py:C{n}" for n in range(12))


def test_a_colon_in_a_folder_belongs_to_the_folder() -> None:
    assert split_target("odd:folder/mine.py:A.B") == ("odd:folder/mine.py", "A.B")


def test_form_and_file_are_examined_without_running_anything(write: Write) -> None:
    write("mine.py", "raise SystemExit(4)")
    require_readable("mine.py:A")
    require_readable("no_such_module:A")
    with pytest.raises(MhaError, match=r"^other\.py does not exist$"):
        require_readable("other.py:A")


def test_finding_loads_no_torch_of_its_own() -> None:
    code = (
        "import sys, mhacli.adapters.usercode.target as t;"
        "t.require_readable('math:sqrt'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ------------------------------------------------------------------------------------------------- files and modules


def test_a_file_that_is_not_there_is_named_with_those_that_are_like_it(write: Write) -> None:
    write("deep/my_attention.py")
    assert told("deep/my_atention.py:A") == (
        "deep/my_atention.py does not exist",
        "did you mean deep/my_attention.py?",
    )
    assert told("nowhere/a.py:A") == ("nowhere/a.py does not exist", None)


def test_what_is_no_python_file_is_refused(write: Write, tmp_path: Path) -> None:
    write("deep.py/inner.py")
    write("./notes.txt", "hello")
    assert told("deep.py:A") == ("deep.py is a directory, not a file", None)
    assert told("./notes.txt:A") == ("./notes.txt is not a Python file: its name does not end in .py", None)
    (tmp_path / "bytes.py").write_bytes(b"x = '\xff'\n")
    message, _ = told("bytes.py:A")
    assert message.startswith("bytes.py cannot be decoded: ")
    (tmp_path / "nul.py").write_bytes(b"x = 1\0\n")
    message, _ = told("nul.py:A")
    assert message.startswith("nul.py could not be imported: ")


def test_a_module_that_is_not_there_is_named_with_those_that_are_like_it(write: Write) -> None:
    write("pack/__init__.py")
    write("pack/layers.py")
    assert told("pack.layer:A") == (
        "module pack.layer does not exist",
        "did you mean pack.layers?",
    )
    assert told("pak.layers:A") == ("module pak.layers does not exist: there is no module pak", "did you mean pack?")
    message, hint = told("qqqqqq:A")
    assert message == "module qqqqqq does not exist"
    assert hint == "a file is named by its path, such as folder/file.py:NAME"


# ------------------------------------------------------------------------------------------------------ what they raise


@pytest.mark.parametrize(
    ("source", "said", "line"),
    [
        ("x = 3\ny = x / 0\n", "ZeroDivisionError: division by zero", "mine.py:2 says: y = x / 0"),
        ("def f(:\n    pass\n", "SyntaxError: invalid syntax", "mine.py:1 says: def f(:"),
        ("if True:\nx = 1\n", "IndentationError: expected an indented block after 'if' statement on line 1",
         "mine.py:2 says: x = 1"),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3", "mine.py:2 says: sys.exit(3)"),
        ("import nothing.such\n", "ModuleNotFoundError: No module named 'nothing'",
         f"mine.py:1 says: import nothing.such; {PYTHON} -m pip install nothing installs it for mha; for a module of your own "
         "set PYTHONPATH to the folder that holds it"),
        ("class E(BaseException): pass\nraise E\n", "E", "mine.py:2 says: raise E"),
        ("raise ValueError('one\\ntwo')", "ValueError: one", "mine.py:1 says: raise ValueError('one\\ntwo')"),
        ("class E(Exception):\n    def __str__(self): return 1 / 0\nraise E", "E", "mine.py:3 says: raise E"),
        ("import json\njson.loads('{')", "JSONDecodeError: Expecting property name enclosed in double quotes: "
         "line 1 column 2 (char 1)", "mine.py:2 says: json.loads('{')"),
        ("from . import other", "ImportError: attempted relative import with no known parent package",
         "mine.py:1 says: from . import other; name it as PACKAGE.MODULE:NAME from the folder that holds its package"),
    ],
)  # fmt: skip
def test_an_exception_in_a_file_is_reported_with_its_message_and_line(
    write: Write, source: str, said: str, line: str
) -> None:
    path = write("mine.py")
    path.write_text(source)
    fault = refused("mine.py:A")
    assert (fault.message, fault.hint) == (f"mine.py could not be imported: {said}", line)
    assert (fault.code, fault.exit_code, fault.path) == ("import", 1, str(path))
    assert "mine" not in sys.modules


def test_the_line_is_in_the_user_file_that_raised(write: Write) -> None:
    write("sibling.py", "def broken():\n    return [].pop()\n")
    write("mine.py", "import sibling\nsibling.broken()\n")
    assert told("mine.py:A") == (
        "mine.py could not be imported: IndexError: pop from empty list",
        "sibling.py:2 says: return [].pop()",
    )
    write("unwritten.py", "def f(:\n")
    write("other.py", "import unwritten\n")
    assert told("other.py:A") == (
        "other.py could not be imported: SyntaxError: invalid syntax",
        "unwritten.py:1 says: def f(:",
    )
    write("outer.py", "import not_there_either\n")
    assert told("outer:A") == (
        "outer could not be imported: ModuleNotFoundError: No module named 'not_there_either'",
        "outer.py:1 says: import not_there_either",
    )


def test_an_interrupt_is_none_of_their_faults(write: Write) -> None:
    write("mine.py", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        find_target("mine.py:A")


# -------------------------------------------------------------------------------------------------------------- names


def test_a_missing_name_is_reported_with_the_existing_ones_modules_first(write: Write) -> None:
    path = write(
        "mine.py",
        """
        from math import sqrt
        from torch import nn
        from torch.nn import Linear
        def attend(q): return q
        class Config: pass
        class Attention(nn.Module): pass
        ready = nn.Linear(1, 1)
        _hidden = attend
        WIDTH = 3
        """,
    )
    fault = refused("mine.py:Atention")
    assert fault.message == "mine.py has no Atention, only Attention, ready, Config, attend"
    assert (fault.hint, fault.path) == ("did you mean mine.py:Attention?", str(path))
    assert told("mine.py:Linea")[1] == "did you mean mine.py:Linear?"


def test_a_missing_nested_name_is_reported_with_those_of_its_class(write: Write) -> None:
    write("mine.py", "class Outer:\n    class Inner: pass\n    def attend(self): pass\n")
    assert told("mine.py:Outer.Iner") == (
        "Outer of mine.py has no Iner, only Inner, attend",
        "did you mean mine.py:Outer.Inner?",
    )


def test_a_file_without_names_is_reported_and_a_long_list_is_cut(write: Write) -> None:
    write("empty.py", "WIDTH = 3")
    assert told("empty.py:A") == ("empty.py has no A, and no class or function", None)
    write("long.py", "".join(f"class C{n:02}: pass\n" for n in range(30)))
    assert told("long.py:Zzz")[0] == f"long.py has no Zzz, only {', '.join(f'C{n:02}' for n in range(12))} and 18 more"


def test_what_is_neither_class_nor_function_is_refused(write: Write) -> None:
    write("mine.py", "import math\nclass A: pass\nWIDTH = 3\n")
    assert told("mine.py:WIDTH") == (
        "WIDTH of mine.py is a value of type int, not a class or function",
        "mine.py:A",
    )
    assert told("mine.py:math") == ("math of mine.py is a module, not a class or function", "mine.py:A")
