"""What stands in type hints of `blocktable`: what its calls take, and what some of them return."""

from blocktable.arrays import AnyArray, Array, BlockIds, Counts, Int, IntArray, Ints, SupportsCudaArray
from blocktable.checking import CheckMode
from blocktable.findings import CheckKinds, Severity
from blocktable.inspection import SlotHolder
from blocktable.layouts import LayoutName, WidthPlan
from blocktable.metadata import Layouts
from blocktable.registry import BackendInfo

__all__ = [
    "AnyArray",
    "Array",
    "BackendInfo",
    "BlockIds",
    "CheckKinds",
    "CheckMode",
    "Counts",
    "Int",
    "IntArray",
    "Ints",
    "LayoutName",
    "Layouts",
    "Severity",
    "SlotHolder",
    "SupportsCudaArray",
    "WidthPlan",
]
