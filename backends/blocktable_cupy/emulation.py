"""The kernels on the host: compiled by the C++ compiler over emulate.h, run over the grid on numpy arrays."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

EMULATE_VARIABLE = "BLOCKTABLE_CUPY_EMULATE"
KERNEL_NAME = re.compile(r'^(?:extern "C" __global__ void |APPLY_CHANGES\()([a-z]\w+)', re.MULTILINE)


def is_emulated() -> bool:
    """Whether the environment asks for the host emulation."""
    return os.environ.get(EMULATE_VARIABLE, "") not in ("", "0")


def compiler() -> str | None:
    """Return the host's C++ compiler, or None."""
    return next(
        (found for name in (os.environ.get("CXX"), "g++", "clang++") if name and (found := shutil.which(name))), None
    )


def kernel_source() -> str:
    """Return kernels.cu."""
    return files("blocktable_cupy").joinpath("kernels.cu").read_text()


def export_source() -> str:
    """Return exports.cu behind what kernels.cu has in front of its first kernel."""
    before_kernels = kernel_source().partition('extern "C" __global__')[0].rpartition("}\n")
    return "".join(before_kernels[:2]) + "\n" + files("blocktable_cupy").joinpath("exports.cu").read_text()


@cache
def build_library(options: tuple[str, ...], source: str) -> ctypes.CDLL:
    """Compile a source for the host, once for each source and set of macros, and load it."""
    shim = files("blocktable_cupy").joinpath("emulate.h").read_text()
    entries = "\n".join(f"EMULATE({name})" for name in KERNEL_NAME.findall(source))
    macros = "\n".join("#define " + option.replace("=", " ", 1) for option in options)
    text = f"{macros}\n{shim}\n{source}\n{entries}\n"
    # A folder of this user's own: nobody else can put a library there.
    folder = Path(tempfile.gettempdir()) / f"blocktable-cupy-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise OSError(f"{folder} belongs to somebody else; set TMPDIR to a folder of your own.")
    library = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = Path(scratch) / "kernels.so"
            subprocess.run(
                [str(compiler()), "-std=c++17", "-O2", "-fwrapv", "-shared", "-fPIC", "-x", "c++", "-", "-o", built],
                input=text.encode(),
                check=True,
            )
            built.replace(library)  # atomic: another process may build the same one
    return ctypes.CDLL(str(library))


class EmulatedKernel:
    """One kernel, called as CuPy's RawKernel is: grid, block, arguments of exact numpy scalar types."""

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self._launch = getattr(library, f"launch_{name}")

    def __call__(self, grid: tuple[int, int], block: tuple[int], args: Sequence[Any], stream: Any = None) -> None:
        cells = [np.asarray(argument) for argument in args]
        self.launch(grid, block[0], [cell.ctypes.data for cell in cells])

    def launch(self, grid: tuple[int, int], block: int, addresses: Sequence[int]) -> None:
        """Run over the grid; `addresses` say where each argument lies, as for cuLaunchKernel."""
        arguments = (ctypes.c_void_p * len(addresses))(*addresses)
        self._launch(ctypes.c_uint(grid[0]), ctypes.c_uint(grid[1]), ctypes.c_uint(block), arguments)
