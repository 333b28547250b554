"""A compiled operation that gets no memory raises MemoryError and changes nothing: each allocation fails in turn."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("blocktable_compiled.operations", reason="the compiled host path was not built")

FAILING = r"""
#include <cstdlib>
#include <new>

static long left = -1;  // allocations until one fails; -1: none does

extern "C" void fail_after(long allocations) { left = allocations; }

void* operator new(std::size_t size) {
  if (left >= 0 && left-- == 0) throw std::bad_alloc();
  if (void* found = std::malloc(size)) return found;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
"""

PROGRAM = r"""
import ctypes, sys
import numpy as np
from blocktable import BlockTableConfig, KVCacheGroup
from blocktable_compiled.journal import CompiledJournal
from blocktable_compiled.rows import CompiledRows


class Rows(CompiledRows):
    journal_type = staticmethod(lambda capacity: CompiledJournal(1))


CONFIG = BlockTableConfig(
    groups=[KVCacheGroup(block_size=16), KVCacheGroup(block_size=32, kernel_block_size=16)],
    max_num_reqs=40, max_num_batched_tokens=4, max_model_len=16 * 900,
)
CALLS = {
    "append_row": lambda rows: rows.append_row(1, [[*range(1, 300)], [5]]),
    "append_rows": lambda rows: rows.append_rows(range(39, 3, -1), [range(1, 300)] * 2, (264, *[1] * 35)),
    "set_row": lambda rows: rows.set_row(0, [[each + each % 2 for each in range(1, 451)], range(1, 300)]),
    "set_rows": lambda rows: rows.set_rows([0, 3], [range(1, 801), np.arange(1, 401)], [[400, 400], [200, 200]]),
    "truncate_rows": lambda rows: rows.truncate_rows(range(3), [0, 1, 2]),
    "clear_rows": lambda rows: rows.clear_rows([0, 3, 2]),
}


def prepare():
    rows = Rows(CONFIG)
    rows.set(np.array([0, 3]), [np.arange(1, 901), np.arange(1, 451)], np.array([[450, 450], [225, 225]]))
    rows.committed()
    for row in (3, 2, 1):  # ranges that a merge would move
        rows.truncate(np.array([row]), 3)
    return rows


def pending(rows):
    return [array.tolist() for array in rows.pending_ranges()]


fail_after = ctypes.CDLL(None).fail_after
for name, call in CALLS.items():
    for failures in range(100):
        rows, same = prepare(), prepare()
        fail_after(failures)
        try:
            call(rows)
            is_done = True
        except MemoryError:
            is_done = False
        fail_after(-1)
        if is_done:
            call(same)
        assert np.array_equal(rows.mirror, same.mirror), name
        assert pending(rows) == pending(same), name
        if is_done:
            break
        call(rows)
    print(name, failures)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="wants LD_PRELOAD")
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler here")
def test_an_operation_without_memory_changes_nothing(tmp_path: Path) -> None:
    """Rules: R6."""
    library = tmp_path / "failing.so"
    subprocess.run(["c++", "-shared", "-fPIC", "-o", library, "-x", "c++", "-"], input=FAILING, text=True, check=True)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"LD_PRELOAD": str(library)},
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    failures = dict(line.split() for line in done.stdout.splitlines())
    assert len(failures) == 6
    assert all(int(number) > 0 for number in failures.values()), failures
