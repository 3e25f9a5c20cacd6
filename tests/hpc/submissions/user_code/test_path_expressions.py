"""Paths in a Python file's text, without running the file."""

import ast
from pathlib import Path

import pytest

from hpc.submissions.user_code.path_expressions import PathExpressions

FILE, HERE = Path("/home/u/project/scripts/train.py"), Path("/home/u/project")


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("os.path.dirname(__file__)", ["/home/u/project/scripts"]),
        ("os.path.dirname(os.path.dirname(os.path.abspath(__file__)))", ["/home/u/project"]),
        ("Path(__file__).resolve().parents[2] / 'data' / 'a.csv'", ["/home/u/data/a.csv"]),
        ("str(Path(__file__).parent.parent)", ["/home/u/project"]),
        ("Path(__file__).parent.joinpath('..', 'x')", ["/home/u/project/x"]),
        ("os.path.join(os.path.dirname(__file__), os.pardir, 'lib')", ["/home/u/project/lib"]),
        ("os.path.dirname(__file__) + '/../lib'", ["/home/u/project/lib"]),
        ("f'{os.getcwd()}/../data'", ["/home/u/data"]),
        ("Path.cwd().parent", ["/home/u"]),
        ("open('../data')", ["/home/u/data"]),
        ("os.chdir('..')", ["/home/u"]),
        ("root = Path('..')\nopen(root / 'a')", ["/home/u", "/home/u/a"]),
        ("os.path.join(unknown, '..', '../x')", []),
        ("unknown / '../x'", ["/home/u/x"]),
        ("print('..', '/etc', 'see ../data for more', name.split('..'))", []),
        ("Path('/abs') / '..'", []),
    ],
)
def test_references(text: str, paths: list[str]) -> None:
    found = PathExpressions(ast.parse(text), FILE, HERE).references()
    outside = {path for path in found if not path.is_relative_to(HERE) or str(path) in paths}
    assert outside == set(map(Path, paths))


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("sys.path.insert(0, '..')", ["/home/u"]),
        ("sys.path.append(os.path.join(os.path.dirname(__file__), '..', 'vendored'))", ["/home/u/project/vendored"]),
        ("sys.path += ['lib', str(Path(__file__).parent)]", ["/home/u/project/lib", "/home/u/project/scripts"]),
        ("sys.path.extend(['lib'])\nsite.addsitedir('more')", ["/home/u/project/lib", "/home/u/project/more"]),
        ("sys.path.append('/opt/lib')\nsys.path.append(name)\nother.append('x')", []),
    ],
)
def test_search_path(text: str, paths: list[str]) -> None:
    assert PathExpressions(ast.parse(text), FILE, HERE).search_path() == list(map(Path, paths))
