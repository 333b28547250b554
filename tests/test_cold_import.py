"""`import blocktable` is cheap, loads no backend and no heavy library, and works without any of them."""

import os
import re
import subprocess
import sys
from collections.abc import Collection
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

LIBRARIES = ("torch", "triton", "cupy", "numba")
NEEDS = {"triton": ("torch", "triton"), "torch": ("torch",), "cupy": ("cupy",), "numba": ("numba",)}
EMULATE = {"triton": "TRITON_INTERPRET", "cupy": "BLOCKTABLE_CUPY_EMULATE", "numba": "NUMBA_ENABLE_CUDASIM"}

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
    heavy = {*LIBRARIES, "pytest", "hypothesis", "rich", "matplotlib", "backports.zstd"}
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
    assert printed.splitlines()[0] == "[83]"


# What `blocktable backends` says of each.


def said_of_backends(
    *, hidden: Collection[str] = (), emulated: Collection[str] = (), **variables: str
) -> dict[str, str]:
    """Return backend -> what `blocktable backends` says of it, in a fresh process that lacks something."""
    environment = {name: value for name, value in os.environ.items() if name not in EMULATE.values()}
    environment |= {EMULATE[name]: "1" for name in emulated} | variables
    source = HIDE.format(hidden=tuple(hidden)) + "from blocktable.cli import main; sys.exit(main(['backends']))"
    command = [sys.executable, "-I", "-c", source]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    paragraphs = re.findall(r"^((\w+)  \(.*\)\n((?:  .*\n)+))", done.stdout, re.MULTILINE)
    rest = done.stdout.removeprefix("".join(paragraph[0] for paragraph in paragraphs))
    assert re.fullmatch(r"host path: .+\n", rest), rest  # one line, behind all of them
    return {name: said for _, name, said in paragraphs}


def all_but(name: str) -> set[str]:
    """Return the other backends that can be emulated: CuPy's emulation does without CuPy."""
    return set(EMULATE) - {name}


@cache
def said_without_gpu(name: str) -> dict[str, str]:
    """Return what is said of all backends where all but one are emulated and nothing is hidden."""
    return said_of_backends(emulated=all_but(name))


def remedy(said: str, name: str) -> str:
    """Return what is said after the name of a backend that cannot run: one sentence, on one line."""
    start = f"  not available: Backend {name!r} cannot run here: "
    assert said.startswith(start), said
    assert said.endswith(".\n"), said
    assert said.count("\n") == 1, said
    return said.removeprefix(start)


@pytest.mark.parametrize(("name", "hidden"), [(name, hidden) for name in NEEDS for hidden in NEEDS[name]])
def test_a_missing_package_is_one_backends_matter(name: str, hidden: str) -> None:
    said, before = said_of_backends(hidden=[hidden], emulated=all_but(name)), said_without_gpu(name)
    assert f"install blocktable[{name}]" in remedy(said.pop(name), name)
    assert said["numpy"].startswith("  available: numpy (host)\n")
    others = [other for other in said if hidden not in NEEDS.get(other, ())]
    assert {other: said[other] for other in others} == {other: before[other] for other in others}


def test_no_gpu_is_said_with_the_remedy_and_numpy_works() -> None:
    """Where there is one it is hidden; where there is no driver, that is said."""
    said = said_of_backends(CUDA_VISIBLE_DEVICES="-1", HIP_VISIBLE_DEVICES="-1")
    assert said["numpy"].startswith("  available: numpy (host)\n")
    for name, variable in EMULATE.items():
        sentence = remedy(said[name], name)
        assert f"set {variable}=1" in sentence or f"install blocktable[{name}]" in sentence
        assert any(word in sentence for word in ("GPU", "driver", "not installed")), sentence


def test_no_compiler_is_said_with_the_remedy_and_numpy_works() -> None:
    said = said_of_backends(emulated=["cupy"], PATH="/nowhere", CXX="")
    assert "install g++ or set CXX" in remedy(said["cupy"], "cupy")
    assert said["numpy"].startswith("  available: numpy (host)\n")


@pytest.mark.parametrize("host_path", ["auto", "numpy"])
def test_the_first_step_of_a_process_compiles_nothing(host_path: str) -> None:
    source = f"""
import os, time
os.environ["BLOCKTABLE_HOST_PATH"] = {host_path!r}
import numpy as np
import blocktable as bt

start = time.process_time()
config = bt.BlockTableConfig(
    groups=[bt.KVCacheGroup(block_size=16)] * 8, max_num_reqs=8, max_num_batched_tokens=8, max_model_len=64
)
table = bt.BlockTable(config, "numpy")
table.append_row(3, [[5]] * 8)
table.append_rows([1, 2], [[6, 7]] * 8, [1, 1])
table.commit()
print(time.process_time() - start)
"""
    assert min(float(run(source)) for _ in range(3)) < 0.5
