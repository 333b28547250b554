"""What the pages promise: rules are named, links lead somewhere, examples and commands run (run by `tox -e docs`)."""

import ast
import inspect
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blocktable as bt
from blocktable.backend import CAPABILITIES, Backend, BlockStore, SlotMapper
from blocktable_conformance.vllm_fuzz.differences import DIFFERENCES, V2_DIFFERENCES
from blocktable_vllm import settings

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
GENERATED = {path.stem.removeprefix("generate_") + ".md": path for path in ROOT.glob("docs/generate_*.py")}
"""Page of docs/ that is not committed -> what makes it."""
PAGES = [
    path
    for pattern in ("*.md", "docs/*.md", "docs/reference/*.md", "examples/*/*.md", "benchmarks/results/*.md")
    for path in ROOT.glob(pattern)
    if path.name not in GENERATED
]
SPEC = (ROOT / "docs/spec.md").read_text()
RULES = [f"R{number}" for number in range(1, 48)]


def blocks(page: str, language: str, mark: str | None = None) -> list[str]:
    """Return the fenced blocks of a page; with `mark`, those behind `<!-- mark -->`."""
    before = "" if mark is None else rf"<!-- {mark} -->\n"
    return re.findall(rf"{before}```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def one_block(page: str, language: str, mark: str) -> str:
    (found,) = blocks(page, language, mark)
    return found.strip()


def table_after(page: str, mark: str) -> dict[str, str]:
    """Return the first two columns of the table behind a mark, without its head."""
    table: str
    (table,) = re.findall(rf"<!-- {mark} -->\n((?:\|.*\n)+)", (ROOT / page).read_text())
    rows = [[cell.strip().strip("`") for cell in line.strip("|\n").split("|")] for line in table.splitlines()[2:]]
    return {row[0]: row[1] for row in rows}


def anchors(page: Path) -> set[str]:
    text = page.read_text() if page.exists() else runpy.run_path(str(GENERATED[page.name]))["page"]()
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# The contract.


def test_the_contract_has_every_rule_in_order() -> None:
    assert re.findall(r"^### (R\d+)\. ", SPEC, re.MULTILINE) == RULES


def section_of(rule: str) -> str:
    section: str
    (section,) = re.findall(rf"^### {rule}\. .*?(?=^##|\Z)", SPEC, re.MULTILINE | re.DOTALL)
    return section


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_says_what_its_tests_check(rule: str) -> None:
    assert "*Tests check*" in section_of(rule)


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_begins_with_a_sentence_of_words(rule: str) -> None:
    """What a newcomer reads first has no formula, and none of its letters."""
    first = re.split(r"[.:]\s", section_of(rule).split("\n\n")[1])[0]
    assert re.match(r"[A-Z`]", first)
    assert not re.search(r"//|\b(B|Bk|k|W|r|I)\b|^Kind ", first), first


@pytest.mark.parametrize("rule", ["R9", "R10", "R25"])
def test_parts_of_a_rule_are_numbered_in_order_and_have_names(rule: str) -> None:
    items = re.findall(r"^- (.*)$", section_of(rule), re.MULTILINE)
    parts = [re.match(rf"\*\*{rule}\.(\d+) ([A-Z][a-z ]+)\.\*\* [A-Z`*]", item) for item in items]
    assert [part and int(part[1]) for part in parts] == list(range(1, len(items) + 1))
    assert len({part[2] for part in parts if part}) == len(items)


def test_every_rule_has_a_test_that_cites_it() -> None:
    suites = (*ROOT.glob("conformance/blocktable_conformance/*.py"), *ROOT.glob("tests/test_*.py"))
    cited = {
        rule
        for path in suites
        for line in re.findall(r"[Rr]ules[:=( ].*", path.read_text())
        for rule in re.findall(r"R\d+", line)
    }
    assert not [rule for rule in RULES if rule not in cited]


def test_every_error_is_in_the_contract_with_its_builtin() -> None:
    errors = {
        name: value
        for name, value in vars(bt).items()
        if inspect.isclass(value) and issubclass(value, bt.BlockTableError) and value is not bt.BlockTableError
    }
    rows = dict(re.findall(r"^\| `(\w+Error)` \| `(\w+)` \|", SPEC, re.MULTILINE))
    assert rows == {name: error.__bases__[1].__name__ for name, error in errors.items()}


def test_every_method_of_a_table_is_in_the_contract() -> None:
    public = [name for name in vars(bt.BlockTable) if not name.startswith("_")]
    assert not [name for name in public if not re.search(rf"\b{name}\b", SPEC)]


# Writing a backend.


def test_capabilities_are_those_of_the_package() -> None:
    assert table_after("docs/writing-a-backend.md", "capabilities") == CAPABILITIES


@pytest.mark.parametrize("protocol", [Backend, BlockStore, SlotMapper], ids=lambda protocol: protocol.__name__)
def test_protocols_are_those_of_the_package(protocol: type) -> None:
    classes = [
        node
        for block in blocks("docs/writing-a-backend.md", "python")
        for node in ast.parse(block).body
        if isinstance(node, ast.ClassDef) and node.name == protocol.__name__
    ]
    (shown,) = classes
    methods = {
        node.name: [argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)]
        for node in shown.body
        if isinstance(node, ast.FunctionDef)
    }
    members = {name: value for name, value in vars(protocol).items() if not name.startswith("_")}
    functions = {name: value for name, value in members.items() if inspect.isfunction(value)}
    assert methods == {name: list(inspect.signature(value).parameters) for name, value in functions.items()}
    attributes = {node.target.id for node in shown.body if isinstance(node, ast.AnnAssign)}  # type: ignore[union-attr]
    assert attributes == {name for name, value in members.items() if isinstance(value, property)}


def test_every_variable_of_ours_is_described() -> None:
    packages = [path for path in ROOT.glob("*/*/**/*.py") if path.parts[len(ROOT.parts)] not in ("tests", "examples")]
    sources = "".join(path.read_text() for path in [*packages, *ROOT.glob("blocktable/*.py")])
    described = table_after("docs/integrating.md", "variables")
    assert set(re.findall(r'"(BLOCKTABLE_[A-Z_]+)"', sources)) == {name for name in described if "BLOCKTABLE" in name}


# vLLM.


def test_the_named_differences_of_the_drop_in_are_those_of_its_fuzzer() -> None:
    page = (ROOT / "docs/vllm.md").read_text()
    tables = [part.partition("\n\n")[0] for part in page.split("<!-- differences")[1:]]
    of_v2, of_v1 = (re.findall(r"^\| `(\w+)` \| (.*) \| (.*) \| (.*) \|$", part, re.MULTILINE) for part in tables)
    assert of_v2 == [
        (name, difference.vllm, difference.ours, ", ".join(difference.profiles))
        for name, difference in V2_DIFFERENCES.items()
    ]
    assert of_v1 == [
        (
            name,
            difference.vllm,
            difference.ours,
            "; ".join([", ".join(difference.modes), *(difference.profiles if len(difference.profiles) == 1 else ())]),
        )
        for name, difference in DIFFERENCES.items()
    ]


def test_variables_of_the_drop_in_are_those_of_its_settings() -> None:
    described = table_after("docs/vllm.md", "vllm variables")
    assert list(described) == [value for name, value in vars(settings).items() if name.endswith("_VARIABLE")]


# Links, examples, commands.


def test_readme_lists_our_backends() -> None:
    (table,) = re.findall(
        r"^\| name \| kernels in .*\n.*\n((?:\|.*\n)+)", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    ours = {info.name for info in bt.list_backends() if info.distribution == "blocktable"}
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == ours


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists() or (linked.resolve().parent == ROOT / "docs" and linked.name in GENERATED), target
        assert not anchor or anchor in anchors(linked), target


def printed(source: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_the_loop_of_the_start_page_prints_what_stands_below_it() -> None:
    source = one_block("docs/index.md", "python", "loop")
    assert printed(source) == one_block("docs/index.md", "text", "loop output").splitlines()
    assert len([line for line in source.splitlines() if line and "import" not in line]) == 25  # as README.md says


def test_readme_and_start_page_show_the_same_gpu_example() -> None:
    """What it prints is tested with torch (test_integrating.py)."""
    assert one_block("README.md", "python", "gpu") == one_block("docs/index.md", "python", "gpu")


def test_the_page_on_many_ranks_prints_what_it_says() -> None:
    """Rules: R18, R19, R27, R33, R45-R47."""
    source = "\n".join(blocks("docs/many-ranks.md", "python", "ranks"))
    promised = re.findall(r"^(?:print\(.*\)  )?# (.*)$", source, re.MULTILINE)
    assert promised
    assert printed(source) == promised


def test_every_word_of_the_contract_that_others_have_too_is_one_of_its_words() -> None:
    """The first column of the table of words names things as the contract's vocabulary does, or as the API does."""
    known = SPEC.partition("## Vocabulary")[2] + "".join(path.read_text() for path in ROOT.glob("blocktable/*.py"))
    names = [name for cell in words_column() for name in re.findall(r"`(\w+)`", cell)]
    assert names
    assert not [name for name in names if name not in known]


def words_column() -> list[str]:
    table: str
    (table,) = re.findall(r"<!-- words -->\n((?:\|.*\n)+)", SPEC)
    lines = table.splitlines()
    assert len({line.count("|") for line in lines}) == 1
    return [line.split("|")[1].strip() for line in lines[2:]]


def test_the_loop_of_integrating_is_short_and_gives_each_token_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules: R12, R42, R44."""
    code, slots = one_block("docs/integrating.md", "python", "loop"), []
    original = bt.BlockTable.step

    def step(table: bt.BlockTable, *args: Any) -> bt.Step:
        made = original(table, *args)
        slots.append(made.slot_mappings[0].tolist())
        return made

    monkeypatch.setattr(bt.BlockTable, "step", step)
    names: dict[str, Any] = {}
    exec(code, names)
    # Blocks 1 and 2 are the first request's, 3 the second's; 4 and 5 follow for positions 8 and 4.
    assert slots[:3] == [[4, 5, 6, 7, 8, 9], [10, 12, 13, 14], [11, 15]]
    assert slots[3:5] == [[16, 20], [21]]
    assert sorted(names["free_blocks"]) == list(range(1, 100))
    assert len(names["requests"]) == 0
    assert not names["requests"].table.num_blocks_per_row.any()
    assert len([line for line in code.splitlines() if line]) <= 28


def test_integrating_runs_in_order() -> None:
    names: dict[str, Any] = {
        "bt": bt,
        "idx_mapping": np.array([0, -1], np.int32),
        "query_start_loc": np.array([0, 1, 1], np.int32),
        "positions": np.array([17]),
    }
    _, config, step, *_ = blocks("docs/integrating.md", "python")  # test_integrating.py runs the others
    exec(config, names)
    names["table"].set_row(0, ([3, 4], [5]))
    exec(step, names)
    assert [slots[0] for slots in names["step"].slot_mappings] == [4 * 16 + 1, 5 * 64 + 17]
    names["seq_lens"] = np.array([18, 0], np.int32)
    exec(one_block("docs/integrating.md", "python", "exports"), names)
    first, second = names["metadata"].groups
    assert (first.entries[:3].tolist(), second.entries[:3].tolist()) == ([3, 4, 0], [20, 21, 0])
    assert first.export is second.export
    assert (names["indptr"].tolist(), names["last_page_lens"].tolist()) == ([0, 2, 2], [2, 0])


FOREIGN = r"(?i)\b(behind|at once|somebody|anew|be had|is no slot|dummies|a dummy(?! run| step))\b"
"""Words for which there are plainer ones: "after", "immediately" or "together", "someone", "again", "padding entry"."""
OURS = [page for page in [*PAGES, *GENERATED.values()] if page.parent.name != "results"]  # those labels a run printed


@pytest.mark.parametrize("page", OURS, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_in_plain_words(page: Path) -> None:
    text = runpy.run_path(str(page))["page"]() if page.suffix == ".py" else page.read_text()
    assert not re.findall(FOREIGN, text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_on_a_page_is_python(page: Path) -> None:
    for block in blocks(str(page.relative_to(ROOT)), "python"):
        ast.parse(block)


@pytest.mark.parametrize("example", sorted(ROOT.glob("examples/*.py")), ids=lambda path: path.name)
def test_examples_run(example: Path) -> None:
    subprocess.run([sys.executable, example], check=True)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A copy of the checkout without what was built or installed there."""
    built = shutil.ignore_patterns(".git", ".venv", ".tox", ".*_cache", "__pycache__", "dist", "build")
    return Path(shutil.copytree(ROOT, tmp_path / "blocktable", ignore=built))


def test_readme_replay_command_runs_from_a_clone(clone: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", one_block("README.md", "bash", "replay")], cwd=clone, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mismatches" in done.stdout


def test_ci_runs_the_readme_test_command() -> None:
    command = one_block("README.md", "bash", "test")
    script = (ROOT / ".ci/run").read_text()
    extract = re.search(r"^command=\$\((.*)\)$", script, re.MULTILINE)
    assert extract is not None
    done = subprocess.run(["bash", "-c", extract[1]], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == command
    assert "\n" not in command, "one command, on one line"
