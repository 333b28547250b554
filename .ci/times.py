"""Print where the time of tox's runs went: `times.py RESULT.json ...`, as tox's --result-json writes them."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any


def rows_of(environments: dict[str, Any]) -> list[tuple[float, str, str]]:
    """Return (seconds, environment, command), setting up as one command."""
    rows = []
    for name, found in environments.items():
        if setup := sum(done["elapsed"] for done in found.get("setup", [])):
            rows.append((setup, name, "set up"))
        for done in found.get("test", []):
            words = done["command"] if isinstance(done["command"], list) else shlex.split(done["command"])
            rows.append((done["elapsed"], name, " ".join([Path(words[0]).name, *words[1:]])))
    return rows


def main(paths: list[str]) -> None:
    """Print the commands of all runs, the longest first; short ones in one line."""
    rows = [
        row for path in paths if Path(path).exists() for row in rows_of(json.loads(Path(path).read_text())["testenvs"])
    ]
    rows.sort(reverse=True)
    print("seconds  environment         command")
    for seconds, name, command in rows:
        if seconds >= 3:
            print(f"{seconds:7.0f}  {name:<18}  {command[:110]}")
    rest = sum(row[0] for row in rows if row[0] < 3)
    print(f"{rest:7.0f}  everything shorter than 3 s; two environments run side by side")


if __name__ == "__main__":
    main(sys.argv[1:])
