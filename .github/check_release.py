"""Say why a tag must not be released: its version is not the project's, or the changelog has no date for it.

python .github/check_release.py v0.1.0
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def problem(tag: str, version: str, changelog: str) -> str | None:
    """Return what is wrong with a release, in a sentence; None: nothing is.

    Args:
        tag: such as v0.1.0.
        version: in pyproject.toml.
        changelog: all of it.
    """
    if tag != f"v{version}":
        return f"The tag is {tag}, but pyproject.toml has version {version}; tag v{version}, or change the version."
    first = next(iter(re.findall(r"^## \[(.*)$", changelog, re.MULTILINE)), "")
    if not re.fullmatch(rf"{re.escape(version)}\] - \d{{4}}-\d\d-\d\d", first):
        return f"CHANGELOG.md must begin with `## [{version}] - ` and the date of the release, but has `## [{first}`."
    return None


if __name__ == "__main__":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    sys.exit(problem(sys.argv[1], project["version"], (ROOT / "CHANGELOG.md").read_text()))
