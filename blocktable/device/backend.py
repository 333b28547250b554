"""What every backend of the device layer is: a name, a driver for each device, and the one store over it."""

from __future__ import annotations

import importlib.util
from typing import Any, ClassVar

from blocktable.arrays import Array, IntArray
from blocktable.config import BlockTableConfig
from blocktable.constants import PROTOCOL_VERSION
from blocktable.device.driver import mapped_memory_works
from blocktable.device.staging import staging_mode
from blocktable.device.store import DeviceStore
from blocktable.errors import ArgumentError


class DeviceBackend:
    """A backend whose store and slot mapper are the core's. A subclass brings a name and drivers.

    Args:
        is_emulated: whether its kernels run on the host.

    Attributes:
        name: of the backend.
        has_exports: whether it has the kernels of `EXPORT_KERNELS`.
        has_checks: whether it has those of `CHECK_KERNELS`, and the others look for mistakes where they are "CHECKED".
        is_emulated: as given; it is decided when the backend is made.
    """

    name: ClassVar[str]
    has_exports: ClassVar[bool] = True
    has_checks: ClassVar[bool] = True
    protocol_version: int = PROTOCOL_VERSION

    def __init__(self, *, is_emulated: bool) -> None:
        self.is_emulated: bool = is_emulated
        self._drivers: dict[tuple[Any, str], Any] = {}  # (place, way of staging) -> driver

    # What a subclass says.

    def why_unavailable(self) -> str | None:
        """Return None where the backend can run, else one sentence: why not, and how to get it."""
        raise NotImplementedError

    def place(self, device: Any) -> Any:
        """Return what tells devices apart: an index; the current one for None."""
        raise NotImplementedError

    def make_driver(self, place: Any) -> Any:
        """Return a new driver, its `is_mapped` true."""
        raise NotImplementedError

    def graph_problem(self) -> str | None:
        """Return why a step cannot be one graph here, in a few words; None: it can."""
        return None if has_cuda_bindings() else "the fused step needs the package cuda-bindings"

    # What the core asks for.

    @property
    def capabilities(self) -> frozenset[str]:
        """What it can do beyond the protocol."""
        declared = {"int32_slots", "streams", "graph_capture"}
        if self.has_exports:
            declared |= {"exports", "export_parts"}
        if self.has_checks:
            declared.add("device_checks")
        if self.is_emulated or self.graph_problem() is None:
            declared.add("fused_step")
        return frozenset(declared)

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """Sentences on what runs instead of the first choice."""
        if self.is_emulated:
            return ()
        sentences = []
        if not self.driver(None).is_mapped:
            sentences.append("changes travel in pinned memory and copies: mapped memory is not used here")
        problem = self.graph_problem()
        if problem is not None:
            sentences.append(f"steps are separate launches: {problem}")
        return tuple(sentences)

    @property
    def emulated_streams(self) -> Any:
        """The streams of the emulation (`EmulatedStreams`), for the suite; None on a device."""
        return self.driver(None).streams if self.is_emulated else None

    def driver(self, device: Any) -> Any:
        """Return the driver of a device, kept for each way of staging: a new one may probe."""
        mode = staging_mode()
        key = (self.place(device), mode)
        if key not in self._drivers:
            driver = self.make_driver(key[0])
            if mode == "params" and not driver.change_sizes:
                raise ArgumentError(
                    f"BLOCKTABLE_STAGING=params needs kernels that take changes by value, which backend {self.name!r} "
                    "does not have; choose auto, mapped or copy."
                )
            driver.is_mapped = mode != "copy"
            if mode in ("auto", "params") and not driver.is_emulated:
                with driver.current():
                    driver.is_mapped = mapped_memory_works(driver)
            self._drivers[key] = driver
        return self._drivers[key]

    def create_block_store(self, config: BlockTableConfig, device: Any = None) -> DeviceStore:
        """Allocate one table, all NULL and empty."""
        driver = self.driver(device)
        with driver.current():
            return DeviceStore(config, driver, has_fused_step="fused_step" in self.capabilities)

    def create_slot_mapper(self, store: Any) -> DeviceStore:
        """Return the slot mapper over a store: the store is both."""
        assert isinstance(store, DeviceStore)
        return store

    def from_host(self, array: IntArray, device: Any = None) -> Array:
        """Return a device copy of `array`."""
        driver = self.driver(device)
        with driver.current():
            return driver.upload(array)

    def to_host(self, array: Array) -> IntArray:
        """Wait for the device and return a host copy of `array`."""
        driver = self.driver(getattr(array, "device", None))
        with driver.current():
            found: IntArray = driver.download(array)
            return found

    def synchronize(self, device: Any = None) -> None:
        """Wait until everything queued on `device` is done."""
        driver = self.driver(device)
        with driver.current():
            driver.synchronize()


def has_cuda_bindings() -> bool:
    """Say whether the driver's bindings are here; CuPy alone brings another package of the namespace `cuda`."""
    return importlib.util.find_spec("cuda") is not None and importlib.util.find_spec("cuda.bindings") is not None
