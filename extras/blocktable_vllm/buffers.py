"""The buffers of a drop-in's table: vLLM's `CpuGpuBuffer` by type, over memory that the table's state owns."""

from __future__ import annotations

from functools import cache
from typing import Any


class TableBuffer:
    """`block_table`: replacing one of its arrays is noticed, and a copy to the device is a commit.

    Args:
        state: of the table.
        group: which group's rows it shows.
    """

    def __init__(self, state: Any, group: int) -> None:
        vars(self).update(
            __state__=state,
            __group__=group,
            gpu=state.device.tables[group],
            cpu=state.host.tables[group],
            np=state.host.rows[group],
        )

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self)["__state__"].give_up_rows()
        own = vars(self)["cpu"]
        # What was shown of the host's rows is a view; a copy of a tensor onto itself costs nothing.
        object.__setattr__(self, name, own if name == "gpu" and _is_same(value, own) else value)

    def copy_to_gpu(self, n: int | None = None) -> Any:
        """Commit the first n rows (None: all) and return them on the device."""
        state = vars(self)["__state__"]
        if state.has_own_rows:
            state.commit_group(vars(self)["__group__"], n)
            return vars(self)["gpu"][:n]
        gpu: Any = self.gpu  # type: ignore[attr-defined]
        return gpu[:n].copy_(self.cpu[:n], non_blocking=True)  # type: ignore[attr-defined]


def _is_same(array: Any, own: Any) -> bool:
    """Whether a tensor is another view of all of the same memory."""
    return (
        isinstance(array, type(own))
        and (array.dtype, array.shape, array.stride(), array.device) == (own.dtype, own.shape, own.stride(), own.device)
        and array.data_ptr() == own.data_ptr()
    )


def _shown(name: str, what: str) -> Any:
    """Return a property of a buffer whose reader is noted while the array is the table's own."""

    def get(buffer: Any) -> Any:
        state, group, value = (vars(buffer)[key] for key in ("__state__", "__group__", name))
        own = state.host.tables[group] if name == "cpu" else state.host.rows[group]
        return state.show_rows(group, name) if value is own else value

    return property(get, lambda buffer, value: vars(buffer).update({name: value}), doc=what)


class TrackedBuffer(TableBuffer):
    """As `TableBuffer`; whoever asks for the host's rows may write to them."""

    # Shown by the object's own entries.
    __given_up__: dict[str, Any] = {"np": None, "cpu": None}  # noqa: RUF012

    np = _shown("np", "[max_num_reqs, width] int32, numpy, writable.")
    cpu = _shown("cpu", "The same memory as a torch tensor.")


def give_up(thing: Any) -> None:
    """Let a table, all of them or a buffer do what vLLM's own does, at its cost: others hold the rows."""
    kind: Any = type(thing)
    object.__setattr__(thing, "__class__", _given_up(kind))


@cache
def _given_up(kind: Any) -> Any:
    """Return a subclass with the plain methods and attributes that a tracked class has put others before."""
    return type(kind.__name__, (kind,), {**kind.__given_up__, "__given_up__": {}, "__module__": kind.__module__})


class SlotBuffer:
    """`slot_mapping`: replacing one of its arrays is noticed.

    Args:
        state: of the table.
        gpu: [max_num_batched_tokens] int64, torch, on the device.
        cpu: the same on the host.
    """

    def __init__(self, state: Any, gpu: Any, cpu: Any) -> None:
        vars(self).update(__state__=state, gpu=gpu, cpu=cpu, np=cpu.numpy())

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self)["__state__"].has_own_slots = False
        object.__setattr__(self, name, value)


@cache
def as_vllm(kind: type, vllm_buffer: type) -> Any:
    """Return a subclass of `kind` that is vLLM's `CpuGpuBuffer` too, whose own constructor it does not call."""
    return type("CpuGpuBuffer", (kind, vllm_buffer), {})
