"""The report: one file that needs no network, whose plots and numbers are there when a browser opens it."""

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from blocktable import cli

pytestmark = pytest.mark.slow

pytest.importorskip("matplotlib", reason="the report needs the extra `report`")

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
OPTIONS = (
    "--headless",
    "--no-sandbox",  # Chromium refuses to run as root inside its sandbox
    "--disable-dev-shm-usage",  # containers often have little of it
    "--disable-gpu",
    "--hide-scrollbars",
    "--host-rules=MAP * 0.0.0.0",  # no network
)
TITLES = ("Backends", "Schedule", "Blocks in use", "Batch", "Bytes sent", "Host time of a step", "How this was made")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    arguments = [
        "replay",
        "--quiet",
        "--max-steps",
        "900",
        "--backend",
        "numpy",
        "--backend",
        "blocktable_numpy:NumpyBackend",
    ]
    assert cli.main([*arguments, "--report", str(path)]) == 0
    return path


class Tags(HTMLParser):
    """Collects what a page loads and whether its tags close."""

    VOID = frozenset({"meta", "br", "link", "img"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.links += [value or "" for name, value in attributes if name in ("src", "href", "xlink:href", "data")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.links += [value or "" for name, value in attributes if name in ("src", "href", "xlink:href", "data")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_one_whole_file(page: Path) -> None:
    text = page.read_text()
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert tags.seen.count("svg") == 4
    assert not {"script", "link", "img", "iframe"} & set(tags.seen)
    assert all(link.startswith("#") for link in tags.links)
    assert "url(http" not in text
    assert "@import" not in text
    for title in TITLES:
        assert f"<h2>{title}</h2>" in text


def test_the_numbers_stand_beside_the_plots(page: Path) -> None:
    text = page.read_text()
    assert "OK: every slot and every batch table entry of 900 steps is right" in text
    assert "command: blocktable replay --quiet --max-steps 900 --backend numpy" in text
    assert re.search(r"versions: blocktable \S+, python \S+, numpy \S+, matplotlib \S+", text)
    assert "<dt>steps</dt><dd>900</dd>" in text
    assert "<td>mismatches</td><td>0</td><td>0</td>" in text
    for label in ("in use", "shared", "full copy", "numpy", "simulated seconds", "microseconds"):
        assert f"{label}" in "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))


def test_a_mismatch_stands_on_top(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(
        "import blocktable_numpy\n"
        "class Broken(blocktable_numpy.NumpyBackend):\n"
        "    description = 'a <broken> one'\n"
        "    def to_host(self, array):\n"
        "        return array + 1\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        path = tmp_path / "report.html"
        arguments = ["--quiet", "--max-steps", "3", "--backend", "broken:Broken", "--report", str(path)]
        assert cli.main(["replay", *arguments]) == 1
    finally:
        sys.path.remove(str(tmp_path))
    text = path.read_text()
    assert 'class="verdict failed"' in text
    assert "<li>a &lt;broken&gt; one: step 1, group 0, request 0 (batch index 0, row 0), column 0: expected" in text
    assert "<broken>" not in text


def test_a_recording_has_a_page_too(tmp_path: Path) -> None:
    recording, path = tmp_path / "run.btrace", tmp_path / "report.html"
    assert cli.main(["replay", "--quiet", "--max-steps", "50", "--record", str(recording)]) == 0
    assert cli.main(["replay", "--quiet", str(recording), "--report", str(path)]) == 0
    assert path.read_text().count("<svg") == 4


def test_without_matplotlib_the_sentence_comes_before_the_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in ("blocktable_replay.page", "blocktable_replay.plots"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert cli.main(["replay", "nowhere.csv", "--report", str(tmp_path / "report.html")]) == cli.USAGE_ERROR
    said = capsys.readouterr().err
    assert "--report needs matplotlib" in said
    assert 'pip install "blocktable[report]"' in said


def test_a_browser_shows_the_page(page: Path, tmp_path: Path) -> None:
    """Opened without a network, the plots have their colours where they belong and nothing is cut off."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser is installed: none of {', '.join(BROWSERS)} is found (apt-get install chromium)")
    image = pytest.importorskip("PIL.Image")
    for width, columns in ((1200, 2), (480, 1)):
        shot = tmp_path / f"{width}.png"
        options = [*OPTIONS, f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},3200"]
        command = [browser, *options, f"--screenshot={shot}", page.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        picture = image.open(shot).convert("RGB")
        assert picture.width == width
        assert count(picture, (0xE3, 0xF4, 0xE8)) > 5000, "the green bar with the verdict"
        for colour, what in (((0x2A, 0x6F, 0xBB), "blue lines"), ((0xD9, 0x82, 0x2B), "orange lines")):
            assert count(picture, colour) > 300, what
        margin = picture.crop((width - 3, 0, width, 3200))
        assert len(margin.getcolors()) == 1, f"something is wider than a window of {width}"
        assert columns_of(picture) == columns


def count(picture, colour: tuple[int, int, int]) -> int:  # type: ignore[no-untyped-def]
    return sum(number for number, found in picture.getcolors(1 << 24) if found == colour)


def columns_of(picture) -> int:  # type: ignore[no-untyped-def]
    """Return how many cards stand side by side at most: the page's ground shows left, right and between them."""
    ground = (0xF5, 0xF7, 0xF9)
    lines = (
        "".join("." if picture.getpixel((x, y)) == ground else "w" for x in range(picture.width))
        for y in range(160, picture.height, 40)  # below the title, whose words stand on the ground too
    )
    return max(len(re.findall(r"\.{8,}", line)) for line in lines) - 1
