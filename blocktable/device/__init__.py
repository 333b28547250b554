"""The device layer: what the contract says of every device, written once. A backend brings a `Driver` and kernels.

docs/writing-a-backend.md shows how; examples/torch_backend is the smallest.
"""

from blocktable.device.backend import DeviceBackend, has_cuda_bindings
from blocktable.device.driver import Driver, GraphKernel, HostBlock, Kernel, device_index
from blocktable.device.emulation import DeviceArray, EmulatedDriver, EmulatedKernel, EmulatedStreams
from blocktable.device.graph import KernelArguments
from blocktable.device.ordering import OrderedStreams, StreamOrder, refuse_capture
from blocktable.device.signatures import (
    CHECK_KERNELS,
    EXPORT_KERNELS,
    FEATURES,
    FUSED_KERNELS,
    INT32_MAX,
    PLAIN_KERNELS,
    SIGNATURES,
    Grid,
    KernelOptions,
    Signature,
    signature_of,
)
from blocktable.device.store import DeviceBuffers, DeviceStore

__all__ = [
    "CHECK_KERNELS",
    "EXPORT_KERNELS",
    "FEATURES",
    "FUSED_KERNELS",
    "INT32_MAX",
    "PLAIN_KERNELS",
    "SIGNATURES",
    "DeviceArray",
    "DeviceBackend",
    "DeviceBuffers",
    "DeviceStore",
    "Driver",
    "EmulatedDriver",
    "EmulatedKernel",
    "EmulatedStreams",
    "GraphKernel",
    "Grid",
    "HostBlock",
    "Kernel",
    "KernelArguments",
    "KernelOptions",
    "OrderedStreams",
    "Signature",
    "StreamOrder",
    "device_index",
    "has_cuda_bindings",
    "refuse_capture",
    "signature_of",
]
