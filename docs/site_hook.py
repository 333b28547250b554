"""What the site adds to the pages as they lie in docs/: generated pages, links to rules, links into the source.

MkDocs calls the `on_*` functions. A rule that is cited but not in the contract fails a strict build.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
OTHER_PAGES = {
    "changes.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "results.md": "benchmarks/results/README.md",
}
"""Page of the site -> the file outside docs/ that it shows."""

RULE = re.compile(r"\bR(\d+)(?:\.(\d+))?\b")
HEADING = re.compile(r"^### (R\d+\. .*)$", re.MULTILINE)
PART = re.compile(r"^- \*\*R(\d+)\.(\d+) (.*?)\*\*", re.MULTILINE)
LINK = re.compile(r"^```.*?^```|`[^`\n]*`|\]\((?P<target>[^)\s]+)\)", re.MULTILINE | re.DOTALL)
TAG = re.compile(r"(<[^>]*>)")
UNLINKED = ("a", "autoref", "code", "pre", "h1", "h2", "h3", "h4", "h5", "h6", "title", "svg", "script", "style")
"""Elements in which a rule stays as it is."""

log = logging.getLogger("mkdocs.hooks.blocktable")


def generated_pages() -> dict[str, Path]:
    """Return page -> the script that makes it: docs/generate_x.py has a function `page` that returns x.md."""
    return {f"{path.stem.removeprefix('generate_')}.md": path for path in sorted(DOCS.glob("generate_*.py"))}


def generate(script: Path) -> str:
    """Return the page that a script makes."""
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    text: str = module.page()
    return text


def rule_anchors(contract: str) -> dict[str, str]:
    """Return rule, or part of one -> its anchor on the page of the contract."""
    anchors = {}
    for heading in HEADING.findall(contract):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        anchors[heading.partition(".")[0]] = slug
    return anchors | {f"R{rule}.{part}": f"r{rule}-{part}" for rule, part, _ in PART.findall(contract)}


ANCHORS = rule_anchors((DOCS / "spec.md").read_text())


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not committed; one that a script has left in docs/ gives way."""
    from mkdocs.structure.files import File

    made = {name: generate(script) for name, script in generated_pages().items()}
    made |= {name: (ROOT / source).read_text() for name, source in OTHER_PAGES.items()}
    for name, text in made.items():
        left = files.get_file_from_path(name)
        if left is not None:
            files.remove(left)
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Give the contract's numbered parts their anchors, and point links where the site has what they name."""
    name = page.file.src_uri
    if name == "spec.md":
        markdown = PART.sub(r"- **R\1.\2 \3**{ #r\1-\2 }", markdown)

    def rewrite(found: re.Match[str]) -> str:
        target = found["target"]
        if target is None or re.match(r"https?:|mailto:|#", target):
            return found[0]
        return f"]({link(name, target)})"

    return drop_links(LINK.sub(rewrite, markdown))


def link(name: str, target: str) -> str:
    """Return where a link of a page leads on the site.

    Args:
        name: the page's, under docs/.
        target: relative to the file that the page shows.
    """
    path, _, anchor = target.partition("#")
    home = OTHER_PAGES.get(name, f"docs/{name}")
    named = posixpath.normpath(posixpath.join(posixpath.dirname(home), path))
    pages = {source: page for page, source in OTHER_PAGES.items()} | {"README.md": "index.md"}
    inside = pages.get(named) or (named.removeprefix("docs/") if named.startswith("docs/") else None)
    if inside is not None and not inside.endswith(".py"):
        relative = posixpath.relpath(inside, posixpath.dirname(name) or ".")
        return relative + (f"#{anchor}" if anchor else "")
    if not (ROOT / named).exists():
        log.warning("%s links to %s, which does not exist", name, named)
    repository = os.environ.get("SITE_REPOSITORY", "").rstrip("/")
    return f"{repository}/blob/HEAD/{named}" if repository else NOWHERE


NOWHERE = "source-without-a-home"


def drop_links(markdown: str) -> str:
    """Leave the text alone of links into the source, where no repository is named that has it."""
    return re.sub(rf"\[([^\]]*)\]\({NOWHERE}\)", r"\1", markdown)


def on_post_build(config: Any) -> None:
    """Check every link with an anchor as it was built: MkDocs looks at those of the pages' text alone."""
    site = Path(config.site_dir)
    pages = {path: path.read_text() for path in site.rglob("*.html")}
    names = {path: set(re.findall(r'\bid="([^"]+)"', html)) for path, html in pages.items()}
    for path, html in pages.items():
        for target, anchor in set(re.findall(r'href="([^":?]*)#([^"]+)"', html)):
            named = (path.parent / target).resolve() if target else path
            named = named / "index.html" if named.is_dir() else named
            if anchor not in names.get(named, ()) and not anchor.startswith("__"):
                log.warning("%s links to %s#%s, which does not exist", path.relative_to(site), target, anchor)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Make a link of every rule that a page or a docstring cites."""
    return link_rules(html, page.file.src_uri)


def link_rules(html: str, name: str) -> str:
    """Return a page with links from `R9` and `R9.2` to the contract."""
    here = re.sub(r"(^|/)index$", "", name.removesuffix(".md")) or "."
    contract = posixpath.relpath("spec", here) + "/"

    def cite(found: re.Match[str]) -> str:
        anchor = ANCHORS.get(found[0])
        if anchor is None:
            log.warning("%s cites %s, which is not in the contract", name, found[0])
            return found[0]
        return f'<a href="{contract}#{anchor}">{found[0]}</a>'

    parts, inside = TAG.split(html), 0
    for index, part in enumerate(parts):
        if part.startswith("<"):
            element = re.match(r"</?([\w-]+)", part)
            if element and element[1] in UNLINKED and not part.endswith("/>"):
                inside += -1 if part.startswith("</") else 1
        elif not inside:
            parts[index] = RULE.sub(cite, part)
    return "".join(parts)
