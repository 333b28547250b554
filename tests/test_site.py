"""What the site adds to the pages: the reference of every public name, links to rules, links into the source."""

from __future__ import annotations

import logging
import re
import runpy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import blocktable as bt
from blocktable import backend, device, observer, typing

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
SPEC = (ROOT / "docs/spec.md").read_text()
hook = runpy.run_path(str(ROOT / "docs/site_hook.py"))
link, link_rules = hook["link"], hook["link_rules"]


# The reference.


def documented() -> list[str]:
    pages = (page.read_text() for page in sorted(ROOT.glob("docs/reference/*.md")))
    return [name for page in pages for name in re.findall(r"^::: (\S+)$", page, re.MULTILINE)]


def test_every_public_name_stands_in_the_reference_once() -> None:
    public = bt, backend, device, observer, typing
    ours = [f"{module.__name__}.{name}" for module in public for name in module.__all__]
    assert sorted(documented()) == sorted(ours)


def test_a_public_name_has_one_home() -> None:
    homes = Counter(name for module in (bt, backend, device, observer, typing) for name in module.__all__)
    assert [name for name, count in homes.items() if count > 1] == []


def test_help_says_where_the_rules_are() -> None:
    for text in (bt.__doc__, bt.BlockTable.__doc__):
        assert text is not None
        assert "docs/spec.md" in text
        assert "blocktable/spec.md" in text  # test_wheel.py finds it there


# Rules.


def test_every_rule_and_every_part_has_an_anchor() -> None:
    anchors = hook["ANCHORS"]
    rules = re.findall(r"^### (R\d+)\. ", SPEC, re.MULTILINE)
    parts = re.findall(r"^- \*\*(R\d+\.\d+) ", SPEC, re.MULTILINE)
    assert set(anchors) == {*rules, *parts}
    assert anchors["R9"] == "r9-commit"
    assert anchors["R9.2"] == "r9-2"


@pytest.mark.parametrize(
    ("page", "path"),
    [("index.md", "spec/"), ("engine.md", "../spec/"), ("spec.md", "./"), ("reference/table.md", "../../spec/")],
)
def test_a_rule_becomes_a_link_to_the_contract(page: str, path: str) -> None:
    found = link_rules("<p>Rules R9, R9.2-R10.</p>", page)
    targets = re.findall(r'<a href="([^"]*)">(R[\d.]*)</a>', found)
    assert [(target.partition("#")[2], text) for target, text in targets] == [
        ("r9-commit", "R9"),
        ("r9-2", "R9.2"),
        ("r10-gather", "R10"),
    ]
    assert {target.partition("#")[0] for target, _ in targets} == {path}


@pytest.mark.parametrize(
    "html", ["<code>R9</code>", "<h3>R9. Commit</h3>", '<a href="#x">R9</a>', '<p title="R9">x</p>']
)
def test_code_headings_and_links_stay_as_they_are(html: str) -> None:
    assert link_rules(html, "engine.md") == html


def test_a_rule_that_is_not_in_the_contract_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert link_rules("<p>R999</p>", "engine.md") == "<p>R999</p>"
    assert "engine.md cites R999, which is not in the contract" in caplog.text


def test_parts_get_their_anchors_on_the_page_of_the_contract() -> None:
    class Page:
        class file:  # noqa: N801
            src_uri = "spec.md"

    shown = hook["on_page_markdown"](SPEC, Page)
    assert "- **R9.2 Isolation.**{ #r9-2 } " in shown


# Links.


@pytest.mark.parametrize(
    ("page", "target", "leads_to"),
    [
        ("engine.md", "spec.md#rows", "spec.md#rows"),
        ("engine.md", "../CONTRIBUTING.md", "contributing.md"),
        ("engine.md", "../README.md", "index.md"),
        ("reference/exports.md", "../layouts.md", "../layouts.md"),
        ("contributing.md", "docs/spec.md", "spec.md"),
        ("results.md", "../../docs/vllm.md#the-two-modes", "vllm.md#the-two-modes"),
        ("performance.md", "../benchmarks/results/README.md#scaling", "results.md#scaling"),
    ],
)
def test_links_between_pages(page: str, target: str, leads_to: str) -> None:
    assert link(page, target) == leads_to


def test_links_into_the_source_want_a_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one the text stays, and no address is made up."""

    def shown(text: str) -> Any:
        class Page:
            class file:  # noqa: N801
                src_uri = "engine.md"

        return hook["on_page_markdown"](text, Page)

    text = "See [examples/engine](../examples/engine), `a[0](b)` and [a page](spec.md)."
    monkeypatch.delenv("SITE_REPOSITORY", raising=False)
    assert shown(text) == "See examples/engine, `a[0](b)` and [a page](spec.md)."
    monkeypatch.setenv("SITE_REPOSITORY", "https://host.example/me/it/")
    assert "[examples/engine](https://host.example/me/it/blob/HEAD/examples/engine)" in shown(text)


def test_a_link_into_the_source_that_leads_nowhere_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        link("engine.md", "../examples/none.py")
    assert "engine.md links to examples/none.py, which does not exist" in caplog.text
