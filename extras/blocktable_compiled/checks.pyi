from typing import Any

import numpy.typing as npt

class TokenCheck:
    def __init__(
        self,
        arena: npt.NDArray[Any],
        num_rows: int,
        fields: npt.NDArray[Any],
        pools: list[tuple[npt.NDArray[Any], npt.NDArray[Any]]],
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
