from typing import Any

import numpy.typing as npt

from blocktable_compiled.holders import CompiledHolders

class TokenCheck:
    def __init__(
        self,
        holders: CompiledHolders,
        fields: npt.NDArray[Any],
        marks: npt.NDArray[Any],
        lives: npt.NDArray[Any],
    ) -> None: ...
    def is_clean(
        self,
        mapping: npt.NDArray[Any] | None,
        starts: npt.NDArray[Any],
        positions: npt.NDArray[Any],
        padded: int,
        is_exact: bool,
    ) -> bool: ...
