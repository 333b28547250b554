"""Lay out vLLM's own paged-KV kernels from its released wheels, so that they import with torch and Triton alone.

    python -m blocktable_benchmarks.peers.consumers .peers     # .peers/consumers-<version>/vllm/...

The wheels come from the package index through pip. What is laid out is vLLM's code beside small stand-ins for what it
imports: it is for running the kernels that read our tables (tests/gpu/consumers.py), and is never committed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

VERSIONS = ("0.25.1", "0.33.0")
OPS = "vllm/v1/attention/ops"
FILES = (
    f"{OPS}/triton_attention_helpers.py",
    f"{OPS}/triton_reshape_and_cache_flash.py",
    f"{OPS}/triton_unified_attention.py",
)
STANDINS = {
    "vllm/envs.py": "def __getattr__(name):\n    return None\n",
    "vllm/logger.py": """\
import logging


def init_logger(name):
    logger = logging.getLogger(name)
    logger.debug_once = logger.debug
    return logger
""",
    # Without a GPU it is neither of those whose properties the launchers ask for.
    "vllm/platforms/__init__.py": """\
import torch


class _Platform:
    def is_rocm(self):
        return torch.version.hip is not None

    def is_xpu(self):
        return not torch.cuda.is_available()

    def is_fp8_fnuz(self):
        return False

    def fp8_dtype(self):
        return torch.float8_e4m3fn

    def has_device_capability(self, capability):
        return not self.is_xpu() and torch.cuda.get_device_capability() >= divmod(capability, 10)

    def is_device_capability_family(self, capability):
        return not self.is_xpu() and torch.cuda.get_device_capability()[0] == capability // 10


current_platform = _Platform()
""",
    "vllm/triton_utils/__init__.py": "import triton\nimport triton.language as tl\n\nHAS_TRITON = True\n",
    "vllm/model_executor/layers/quantization/utils/quant_utils.py": """\
import torch

FP8_DTYPE = torch.float8_e4m3fn


def get_fp8_min_max():
    limits = torch.finfo(FP8_DTYPE)
    return limits.min, limits.max
""",
    "vllm/v1/kv_cache_interface.py": """\
from enum import IntEnum


class KVQuantMode(IntEnum):
    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4


def is_quantized_kv_cache(kv_cache_dtype):
    return kv_cache_dtype not in ("auto", "float16", "bfloat16", "float32")
""",
    "vllm/utils/torch_utils.py": "from vllm.v1.kv_cache_interface import is_quantized_kv_cache\n",
}
"""Module -> what stands for it: as much as the kernels above use, for caches that are not quantised."""

FLASH_ATTENTION = "vllm/vllm_flash_attn"
FA3_FILES = (f"{FLASH_ATTENTION}/flash_attn_interface.py",)
FA3_LIBRARY = f"{FLASH_ATTENTION}/_vllm_fa3_C.abi3.so"
FA3_VERSION = "0.25.1"  # built for torch 2.11 and CUDA 13


def lay_out(version: str, destination: Path) -> None:
    """Put vLLM's files and their stand-ins under `destination`, ready to be on `sys.path`.

    FlashAttention 3 is a library of 150 MB: it stays in an archive, `fa3.zip`, for whoever runs it to unpack.
    """
    names = FILES + (FA3_FILES if version == FA3_VERSION else ())
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, f"vllm=={version}"]
        subprocess.run(command, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            contents = {name: archive.read(name).decode() for name in names}
            if version == FA3_VERSION:
                destination.mkdir(parents=True, exist_ok=True)
                with zipfile.ZipFile(destination / "fa3.zip", "w", zipfile.ZIP_DEFLATED) as packed:
                    packed.writestr(Path(FA3_LIBRARY).name, archive.read(FA3_LIBRARY))
    for name, text in {**contents, **STANDINS}.items():
        target = destination / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    for module in list(destination.rglob("*.py")):
        for folder_above in module.relative_to(destination).parents:
            if folder_above.name:
                (destination / folder_above / "__init__.py").touch()


def main() -> int:
    """Lay out every version under the folder that the command line names."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".peers")
    for version in VERSIONS:
        lay_out(version, root / f"consumers-{version}")
        sys.stdout.write(f"laid out {root / f'consumers-{version}'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
