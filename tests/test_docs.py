"""What the documents say against what the library is."""

from __future__ import annotations

import doctest
import html
import importlib
import importlib.util
import inspect
import re
import subprocess
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import fp4linear.files
from fp4linear import _core

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()
DOCUMENTS = [*ROOT.glob("*.md"), *DOCS.glob("*.md")]
MAP = (ROOT / "CONTRIBUTING.md").read_text()

PACKAGES = [
    pytest.param("fp4linear"),
    pytest.param("fp4linear.files"),
    pytest.param("fp4linear.torch", marks=pytest.mark.torch),
    pytest.param("fp4linear.jax", marks=pytest.mark.jax),
    pytest.param("fp4linear.onnx"),
]
# They need a group of processes: examples/torch_tensor_parallel.py is their example.
WITHOUT_EXAMPLE = {"ColumnParallel", "RowParallel"}
DETAILED = ("cpp/", "tools/")


def imported(package: str) -> ModuleType:
    if package == "fp4linear.onnx":
        pytest.importorskip("onnx")
    return importlib.import_module(package)


def documented(page: str) -> set[str]:
    """The names that a page of the reference has a place for."""
    text = (DOCS / "reference" / f"{page}.rst").read_text()
    return set(re.findall(r"^\.\. (?:auto)?(?:function|class|exception|data):: (\w+)", text, re.M))


@pytest.mark.parametrize("package", PACKAGES)
def test_the_reference_has_every_public_name(package: str) -> None:
    assert documented(package.removeprefix("fp4linear.")) == set(imported(package).__all__)


def test_the_reference_has_every_function_of_the_core() -> None:
    public = {name for name in dir(_core) if not name.startswith("_")} - {"Fp4Linear", "Plan"}
    assert documented("core") == public


def is_public_call(thing: Any) -> bool:
    """Functions, and classes that a caller makes: not records, which functions return, nor errors and types."""
    if inspect.isclass(thing):
        record = hasattr(thing, "__dataclass_fields__") or issubclass(thing, (tuple, BaseException))
        return thing.__module__.startswith("fp4linear") and not record and not inspect.isabstract(thing)
    return inspect.isroutine(thing)


def examples(module: ModuleType) -> Iterator[doctest.DocTest]:
    parser = doctest.DocTestParser()
    things = {"": module} | {name: getattr(module, name) for name in module.__all__}
    for name, thing in things.items():
        own = inspect.getdoc(thing) if name == "" or is_public_call(thing) or inspect.isclass(thing) else None
        yield parser.get_doctest(own or "", {}, f"{module.__name__}.{name}".rstrip("."), None, None)


@pytest.mark.parametrize("package", PACKAGES)
def test_examples_of_the_docstrings(package: str) -> None:
    tests = list(examples(imported(package)))
    runner = doctest.DocTestRunner()
    for test in tests:
        runner.run(test)
    assert runner.tries > 0
    assert runner.failures == 0


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_call_has_an_example(package: str) -> None:
    module = imported(package)
    with_one = {test.name.rpartition(".")[2] for test in examples(module) if test.examples}
    calls = {name for name in module.__all__ if is_public_call(getattr(module, name))}
    assert calls - with_one - WITHOUT_EXAMPLE - {"Plan"} == set()  # a Plan is what layer.plan() returns


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_has_words(package: str) -> None:
    """Names, and the methods and properties of classes that are not inherited."""
    module = imported(package)
    silent = []
    for name in module.__all__:
        thing = getattr(module, name)
        if not (inspect.isclass(thing) or inspect.isroutine(thing)):
            continue
        if not inspect.getdoc(thing):
            silent.append(name)
        members = vars(thing) if inspect.isclass(thing) and thing.__module__.startswith("fp4linear") else {}
        for member, value in members.items():
            called = isinstance(value, (property, classmethod, staticmethod)) or inspect.isroutine(value)
            if not member.startswith("_") and called and not inspect.getdoc(getattr(thing, member)):
                silent.append(f"{name}.{member}")
    assert silent == []


def rows_of(table: str) -> list[list[str]]:
    lines = [line for line in table.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_page_of_switches_is_the_table_of_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    for switch in _core.environment():
        monkeypatch.delenv(switch["name"], raising=False)
    page = (DOCS / "switches.md").read_text()
    first_table = page[page.index("| variable") : page.index("| argument")]
    columns = ("name", "value", "takes", "meaning")
    expected = [[switch[column] for column in columns] for switch in _core.environment()]
    assert [[row[0].strip("`"), *row[1:]] for row in rows_of(first_table)] == expected


def programs_of(document: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", document.read_text(), re.M | re.S)


@pytest.mark.torch
def test_the_readmes_first_program_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch import nn

    name = "model.layers.0.mlp.down_proj"
    (tmp_path / "checkpoint").mkdir()
    for file in ("model.safetensors", "checkpoint/model.safetensors"):
        fp4linear.files.save_modelopt(tmp_path / file, {name: fp4linear.quantize(np.eye(32, 64))})
    mlp = nn.ModuleDict({"down_proj": nn.Linear(64, 32, bias=False)})
    layers = nn.ModuleList([nn.ModuleDict({"mlp": mlp})])
    model = nn.ModuleDict({"model": nn.ModuleDict({"layers": layers})})
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"model": model}
    exec(programs_of(ROOT / "README.md")[0].replace('"cuda"', '"cpu"'), scope)
    assert (scope["y"] == scope["x"][:, :32]).all()
    assert scope["report"].layers == {name: name}


def test_the_readmes_program_for_numpy_runs() -> None:
    rng = np.random.default_rng(0)
    arrays = {"w": (32, 64), "bias": (32,), "x": (2, 3, 64), "y": (2, 3, 32)}
    scope: dict[str, Any] = {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in arrays.items()}
    exec(programs_of(ROOT / "README.md")[1], scope)
    exact = fp4linear.reference(scope["x"], *scope["q"], scope["bias"])
    np.testing.assert_allclose(scope["y"], exact, rtol=1e-4, atol=1e-4)


def test_the_readme_names_every_path() -> None:
    plan = _core.plan(64, 128, 1, path="dequant_cublas", kernels=[])
    assert set(plan.reasons) <= set(re.findall(r"`(\w+)`", README))


def test_the_picture_of_the_ladder_is_the_planners() -> None:
    spec = importlib.util.spec_from_file_location("doc_pictures", ROOT / "tools" / "doc_pictures.py")
    assert spec is not None and spec.loader is not None
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)
    words = re.search(r"<dc:description>(.*?)</dc:description>", (DOCS / "ladder.svg").read_text(), re.S)
    assert words is not None
    assert html.unescape(words[1]) == pictures.ladder_in_words()  # else: python tools/doc_pictures.py


def test_the_readme_names_every_command() -> None:
    from fp4linear.cli import app

    commands = {command.name for command in app.registered_commands}
    assert commands <= set(re.findall(r"fp4linear (\w+)", README))


def anchors_of(document: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", document.read_text(), flags=re.M | re.S), re.M)
    plain = [re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)).lower() for heading in headings]
    return {heading.strip().replace(" ", "-") for heading in plain}


def links_of(document: Path) -> list[str]:
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.M | re.S)
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"[a-z]+:", link)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_of_the_documents(document: Path) -> None:
    for link in links_of(document):
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        assert target.exists(), link
        if anchor:
            assert anchor in anchors_of(target), link


def test_every_page_has_a_place_in_the_site() -> None:
    pages = {str(path.relative_to(DOCS).with_suffix("")) for ext in ("md", "rst") for path in DOCS.rglob(f"*.{ext}")}
    entries = set()
    for index in (DOCS / "index.md", DOCS / "reference" / "index.rst"):
        folder = index.parent.relative_to(DOCS)
        lines = re.findall(r"^(?: {3})?([\w/]+)$", index.read_text(), re.M)
        entries |= {str(folder / line) for line in lines}
    assert pages - entries == {"index"}


@pytest.fixture(scope="module")
def tracked() -> list[PurePosixPath]:
    try:
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no git repository")
    return [PurePosixPath(name) for name in listed.stdout.splitlines()]


def test_the_map_of_the_tree_is_true(tracked: list[PurePosixPath]) -> None:
    """Every file and folder that CONTRIBUTING.md names exists, where its line says or below it."""
    there = {str(path) for path in tracked} | {f"{parent}/" for path in tracked for parent in path.parents}
    for line in MAP.splitlines():
        names = re.findall(r"`([\w.*/-]+)`", line)
        folders = [name for name in names if name in there and name.endswith("/")]
        for name in names:
            is_path = "/" in name or re.search(r"\.(py|cc|cpp|h|sh|md|toml|\*)$", name)
            if is_path and name not in there:
                assert any(fnmatch(path, f"{folder}*{name}") for path in there for folder in folders or [""]), name


def test_the_map_of_the_tree_names_every_piece(tracked: list[PurePosixPath]) -> None:
    """What lies on the first level, and the folders in cpp/ and tools/."""
    first = {path.parts[0] + ("/" if len(path.parts) > 1 else "") for path in tracked}
    second = {(path.parts[0] + "/", path.parts[1] + "/") for path in tracked if len(path.parts) > 2}
    named = {name for name in first if f"`{name}" in MAP}
    for folder, below in second:
        if folder in DETAILED:
            assert f"`{folder}{below}" in MAP or re.search(rf"^\| `{folder}`.*`{below}", MAP, re.M), folder + below
    hidden = {name for name in first if name.startswith(".") and name != ".ci/"}
    assert first - named - hidden - {"CONTRIBUTING.md"} == set()
