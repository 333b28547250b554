"""`import blocktable` is cheap, loads no backend and no heavy library, and works without any of them."""

import subprocess
import sys
from pathlib import Path

import pytest

LIBRARIES = ("torch", "triton", "cupy", "numba")
NEEDS = {"triton": ("torch", "triton"), "cupy": ("cupy",), "numba": ("numba",)}

# Every finder is asked through one that does not know the hidden names, so that they are missing as they would be
# where nobody installed them.
HIDE = """
import sys
class Hiding:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {hidden!r} else self.finder.find_spec(name, path, target)
sys.meta_path[:] = map(Hiding, sys.meta_path)
"""


def run(source: str, *path: Path) -> str:
    """Run `source` in a fresh process, the folders of `path` before all others, and return what it printed."""
    prelude = "".join(f"import sys; sys.path.insert(0, {str(folder)!r})\n" for folder in path)
    done = subprocess.run([sys.executable, "-I", "-c", prelude + source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_adds_under_120_ms_to_numpy() -> None:
    source = """
import numpy, time
start = time.process_time()  # not the clock on the wall: other work on the machine is none of ours
import blocktable
print(time.process_time() - start)
"""
    seconds = min(float(run(source)) for _ in range(5))
    assert seconds < 0.120, f"import blocktable took {seconds * 1000:.0f} ms"


def test_import_and_listing_touch_no_library(tmp_path: Path) -> None:
    for library in LIBRARIES:  # found first, whether the real one is installed or not
        (tmp_path / f"{library}.py").write_text(f"raise SystemExit('{library} was imported')\n")
    loaded = run("import blocktable, sys; blocktable.list_backends(); print(*sys.modules)", tmp_path).split()
    assert "blocktable" in loaded
    heavy = {*LIBRARIES, "pytest", "hypothesis", "rich", "matplotlib", "zstandard"}
    assert not heavy & set(loaded)
    assert not [name for name in loaded if name.startswith("blocktable_")], (
        "a backend was loaded before it was asked for"
    )


@pytest.mark.parametrize("hidden", [*LIBRARIES, LIBRARIES], ids=str)
def test_works_with_a_library_hidden(hidden: str | tuple[str, ...]) -> None:
    """A named backend that misses its library says its name, why, and how to get it."""
    names = (hidden,) if isinstance(hidden, str) else hidden
    printed = run(
        HIDE.format(hidden=names)
        + f"needs, hidden = {NEEDS!r}, {names!r}\n"
        + """
import numpy as np
import blocktable as bt

config = bt.BlockTableConfig(
    groups=[bt.KVCacheGroup(block_size=16)], max_num_reqs=1, max_num_batched_tokens=2, max_model_len=16
)
table = bt.BlockTable(config, backend="numpy")
table.set_row(0, [5])
print(table.step(np.array([0], np.int32), np.array([0, 1], np.int32), np.array([3])).slot_mappings[0].tolist())
for info in bt.list_backends():
    missing = set(hidden) & set(needs.get(info.name, ()))
    try:
        bt.get_backend(info.name)
    except bt.BackendUnavailableError as error:
        assert repr(info.name) in str(error), error
        how = f"blocktable[{info.name}]"  # what pip is to install
        assert not missing or (how in str(error) and any(name in str(error) for name in needs[info.name])), error
    else:
        assert not missing, f"{info.name} runs without {missing}"
"""
    )
    assert printed.splitlines()[0] == "[83, -1]"
