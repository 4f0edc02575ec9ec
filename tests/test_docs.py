"""What the documentation says is so: examples run, snippets print what is shown, links lead somewhere.

In README.md and docs/ the blocks of one page run in order, in one folder and one namespace: ``python``
blocks, and in ``console`` blocks the lines after ``$``. What stands under a command, or in a ``text`` block
right after a ``python`` block, is what it prints: ``...`` stands for anything, durations for any duration,
and numbers agree to one unit of their last digit. ``<!-- no-run -->`` above a block leaves it out.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import importlib.util
import io
import os
import pkgutil
import re
import runpy
import shlex
import signal
import socket
import string
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import typer
import yaml

import irkit
from irkit.errors import MissingDependencyError
from irkit.index import FaissConfig

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^(?P<skip><!-- no-run -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
TOKEN = re.compile(r"\.\.\.|-?\d+\.\d+|\w+|[^\w\s]")


def page_id(page: Path) -> str:
    return page.name


class Step(NamedTuple):
    """A piece of a page that runs, and what it should print; None is not shown."""

    line: int
    language: str
    code: str
    shown: str | None


def steps(page: Path) -> Iterator[Step]:
    source = page.read_text()
    blocks = list(BLOCK.finditer(source))
    for number, block in enumerate(blocks):
        line, text = source[: block.start()].count("\n") + 1, block["text"]
        if block["skip"]:
            continue
        if block["language"] == "python":
            after = blocks[number + 1] if number + 1 < len(blocks) else None
            output = after and after["language"] == "text" and not source[block.end() : after.start()].strip()
            yield Step(line, "python", text, after["text"] if after and output else None)
        if block["language"] == "console":
            for part in re.split(r"^\$ ", text, flags=re.M)[1:]:
                command, _, shown = part.partition("\n")
                yield Step(line, "console", command, shown)


class Screen(io.StringIO):
    """A terminal 100 columns wide, as far as a program can tell."""

    def isatty(self) -> bool:
        return True


def run_command(command: str, terminal: bool = True) -> str:
    """Output and messages of a shell command; irkit and Python run in this process.

    The output is a terminal, unless something is piped in.
    """
    fed_by, pipe, last = command.rpartition(" | ")
    splitter = shlex.shlex(last, posix=True, punctuation_chars=True)
    splitter.whitespace_split = True
    words = list(splitter)
    if words[0] not in ("irkit", "python") or {"|", "<", ">", ";", "&", "&&", "||"} & set(words):
        return run_in_shell(command)
    screen, messages = Screen() if terminal and not pipe else io.StringIO(), io.StringIO()
    messages.write = screen.write  # type: ignore[method-assign] (one stream, but no terminal: no bars)
    with contextlib.ExitStack() as stack:
        if pipe:
            given = io.TextIOWrapper(io.BytesIO(run_in_shell(fed_by).encode()))
            stack.enter_context(mock.patch.object(sys, "stdin", given))
        stack.enter_context(contextlib.redirect_stdout(screen))
        stack.enter_context(contextlib.redirect_stderr(messages))
        if words[0] == "python":
            assert words[1] == "-c"
            exec(compile(words[2], command, "exec", dont_inherit=True), {})
        else:
            from irkit.cli import main

            with pytest.raises(SystemExit):
                main(words[1:])
    return re.sub(r"\x1b\[[\d;]*m", "", screen.getvalue())


def run_in_shell(command: str) -> str:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    result = subprocess.run(
        ["bash", "-c", command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PATH": path},
    )
    return result.stdout


def run(step: Step, names: dict[str, object]) -> str:
    """What a step prints."""
    if step.language == "console":
        return run_command(step.code)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(step.code, f"line {step.line}", "exec", dont_inherit=True), names)
    return printed.getvalue()


def tokens(text: str) -> list[str]:
    return TOKEN.findall(re.sub(r"\d[\d.,]* (?=m?s\b)", "0 ", text))


def matches(shown: list[str], got: list[str]) -> bool:
    for at, token in enumerate(shown):
        if token == "...":
            return any(matches(shown[at + 1 :], got[start:]) for start in range(at, len(got) + 1))
        if at >= len(got) or not agree(token, got[at]):
            return False
    return len(shown) == len(got)


def agree(shown: str, got: str) -> bool:
    if shown == got:
        return True
    try:
        unit = 10.0 ** -len(shown.partition(".")[2])
        return "." in shown and abs(float(shown) - float(got)) <= 1.01 * unit
    except ValueError:
        return False


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Go to a folder with the examples of a checkout, for what a page writes."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "tmp").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    for name, value in {"COLUMNS": "100", "TERM": "dumb"}.items():
        monkeypatch.setenv(name, value)
    yield
    if (tmp_path / "serve.pid").exists():  # of a server that a page starts, if a step has failed
        with contextlib.suppress(ProcessLookupError):
            os.kill(int((tmp_path / "serve.pid").read_text()), signal.SIGKILL)


@pytest.fixture
def hub(minilm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of the Hugging Face hub that holds the model of the pages, which run in float32 everywhere."""
    repository = tmp_path / "hub" / "models--sentence-transformers--all-MiniLM-L6-v2"
    for folder in ("refs", "snapshots"):
        (repository / folder).mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    (repository / "snapshots" / ("0" * 40)).symlink_to(minilm)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("irkit.model.hardware.prefers_bfloat16", lambda device: False)


@contextlib.contextmanager
def skip_where_missing() -> Iterator[None]:
    try:
        yield
    except MissingDependencyError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_page_shows_what_happens(page: Path, workplace: None, hub: None) -> None:
    names: dict[str, object] = {"__name__": "page"}
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = str(listening.getsockname()[1])  # free, in place of that of the page
    for step in steps(page):
        with skip_where_missing():
            printed = run(step._replace(code=step.code.replace("8080", port)), names)
        if step.shown is not None:
            place = f"{page.name}, block of line {step.line}"
            assert matches(tokens(step.shown), tokens(printed)), f"{place}\n{step.code}\n{printed}"


def test_checks_of_this_file() -> None:
    assert matches(tokens("a 0.251 ... in 3 s"), tokens("a  0.252\nb c in 0.2 s"))
    for shown, printed in [("a", "a b"), ("a b", "a"), ("0.251", "0.253"), ("1 ...", "2 3"), ("1", "1.2")]:
        assert not matches(tokens(shown), tokens(printed))


def anchors(page: Path) -> set[str]:
    """Names of the headings as GitHub and MkDocs make them."""
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.M
    )
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", page.read_text())):
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


def test_every_page_is_in_the_navigation() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    linked = [
        name
        for group in config["nav"]
        for pages in group.values()
        for page in pages
        for name in page.values()
    ]
    assert sorted(linked) == [page.name for page in PAGES[1:]]


def test_speed_in_the_readme_is_measured() -> None:
    page = (ROOT / "README.md").read_text().replace(",", "")
    rows = re.findall(r"^\| [A-Z].* \| (.*\d.*) \| (.*\d.*) \| ([\d.]+) \|$", page, re.M)
    measured = set(re.findall(r"\d[\d.]*", (ROOT / "docs" / "benchmarks.md").read_text()))
    assert len(rows) == 6
    for irkit_cell, other_cell, times in rows:
        ours, theirs = (re.findall(r"(?<![a-z\d.])\d[\d.]*", cell) for cell in (irkit_cell, other_cell))
        assert {*ours, *theirs} <= measured, (irkit_cell, other_cell)
        ratio = float(ours[0]) / float(theirs[0])
        assert max(ratio, 1 / ratio) == pytest.approx(float(times), rel=0.03), times


def test_every_option_is_explained() -> None:
    from irkit.cli import app

    page = (ROOT / "docs" / "cli.md").read_text()
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        section = re.search(rf"^## irkit {name}$(.*?)(?=^## |\Z)", page, re.M | re.S)
        assert section, name
        for option in {option for parameter in command.params for option in parameter.opts}:
            assert not option.startswith("--") or option in section[1] or option == "--help", (name, option)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_in_sentences_have_these_options(page: Path) -> None:
    from irkit.cli import app

    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for verb, rest in re.findall(r"`irkit ([a-z][a-z-]*)([^`]*)`", BLOCK.sub("", page.read_text())):
        known = {option for parameter in commands[verb].params for option in parameter.opts}
        assert set(re.findall(r"--[a-z][\w-]*", rest)) <= known | {"--help"}, (verb, rest)


def test_every_setting_is_explained() -> None:
    page = (ROOT / "docs" / "indexes.md").read_text()
    for name, field in FaissConfig.model_fields.items():
        assert name == "kind" or f"| `{name}` | `{field.default!r}` |" in page


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_names_of_irkit_exist(page: Path) -> None:
    text = page.read_text()
    names = set(re.findall(r"\birkit(?:_kernels)?(?:\.[A-Za-z_]\w*)+", text))
    names -= {
        "irkit.json",
        "irkit.lock",
        "irkit.indexes",
        "irkit.losses",
        "irkit.families",
        "irkit.objectives",
        "irkit.regularizers",
    }  # files, entry points
    for module, imported in re.findall(r"^from (irkit[\w.]*) import (.+)$", text, re.M):
        names |= {f"{module}.{name.strip()}" for name in imported.split(",")}
    for name in names:
        # adapters need libraries that may be missing, and their page runs
        assert name.startswith("irkit.adapters.") or pkgutil.resolve_name(name), name
    folders = [ROOT / name for name in ("irkit", "kernels", "tests", "examples", "benchmarks")]
    for file in re.findall(r"`((?:\w+/)*\w+\.py)`", text):
        assert (ROOT / file).exists() or any(list(folder.rglob(file)) for folder in folders), file


def test_commands_of_contributors_name_what_exists() -> None:
    page, makefile = (ROOT / "docs" / "contributing.md").read_text(), (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make (\w+)`", page):
        assert re.search(rf"^{target}:", makefile, re.M), target
    paths = set(re.findall(r"\b(?:tests|kernels|irkit)/[\w/.]*\w", page))
    assert len(paths) > 20
    for path in paths:
        assert (ROOT / path).exists(), path
    markers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
    assert all(f"`{marker.partition(':')[0]}`" in page for marker in markers)


MODULES = [module.name for module in pkgutil.walk_packages(irkit.__path__, "irkit.")]


@pytest.mark.parametrize("name", [name for name in ["irkit", *MODULES] if not name.endswith("__main__")])
def test_docstrings(name: str, workplace: None) -> None:
    with skip_where_missing():
        module = importlib.import_module(name)
    failed, _ = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert not failed


EXAMPLES = {
    "quickstart.py": "mice      Dormice",
    "python_api.py": "[0 3]",
    "multi_vector.py": "2.916  bears: Brown bears",
    "sparse.py": "BM25: nDCG@10 0.426",
    "data_formats.py": "twice.tsv:2: id 'd1' was used before, at 1",
    "evaluate_run.py": "nDCG@10: +0.0190, p = 0.343",
    "cli.sh": "nDCG@10\t",
    "mining.sh": '"document_ids": ["bears", "swifts", "bats"], "positives": 1}',
}


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """Here, and for temporary files: nothing is left there, and the folder of the examples is as it was."""
    before = sorted((ROOT / "examples").rglob("[!_]*"))
    places = [tmp_path / "here", tmp_path / "temporary"]
    for place in places:
        place.mkdir()
    monkeypatch.chdir(places[0])
    monkeypatch.setattr(tempfile, "tempdir", str(places[1]))
    yield places
    assert not [file for place in places for file in place.rglob("*")]
    assert sorted((ROOT / "examples").rglob("[!_]*")) == before


@pytest.mark.parametrize("script", [name for name in EXAMPLES if name.endswith(".py")])
def test_example(
    script: str, minilm: str, places: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [script])
    runpy.run_path(str(ROOT / "examples" / script), run_name="__main__")
    printed, messages = capsys.readouterr()
    assert EXAMPLES[script] in printed
    assert all(line.startswith("irkit: ") for line in messages.splitlines()), messages


@pytest.mark.parametrize("script", [name for name in EXAMPLES if name.endswith(".sh")])
def test_commands_of_example(
    script: str, minilm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lines of a script but the first, which make the folder and the variables that are made here."""
    begin, _, lines = (ROOT / "examples" / script).read_text().partition("\n\n")
    assert begin.splitlines()[-1].startswith("model=$(python")
    monkeypatch.chdir(ROOT / "examples")
    printed = ""
    for line in lines.replace("\\\n", " ").splitlines():
        if line and not line.startswith("#"):
            command = string.Template(line).substitute(work=tmp_path, model=minilm)
            output = run_command(command, terminal=False)
            assert "error" not in output
            printed += output
    assert EXAMPLES[script] in printed


@pytest.mark.slow
@pytest.mark.parametrize("script", EXAMPLES)
def test_example_as_a_process(script: str, minilm: str, places: list[Path]) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "TMPDIR": str(places[1]), "PYTHONDONTWRITEBYTECODE": "1"}
    runner = sys.executable if script.endswith(".py") else "bash"
    command = [runner, ROOT / "examples" / script]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert EXAMPLES[script] in result.stdout
    assert all(line.startswith("irkit: ") for line in result.stderr.splitlines()), result.stderr


def test_demo_leaves_an_index_to_search(
    minilm: str, workplace: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples" / "demo.py")
    assert spec
    assert spec.loader
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    monkeypatch.setattr(demo, "PASSAGES", 60)
    monkeypatch.setattr(sys, "argv", ["demo.py", "demo-index"])
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        demo.main()
    assert all(question in printed.getvalue() for question in demo.QUESTIONS)
    found = run_command('irkit search demo-index --text "abstract base class" --k 1')
    assert "abc" in found


def test_tables_of_results_are_those_stored() -> None:
    code = "from benchmarks.pages import fill_pages; print(fill_pages(write=False))"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout == "[]\n"
