from typing import Any

import numpy.typing as npt

from blocktable_compiled.journal import CompiledJournal

class CompiledHolders:
    def __init__(
        self,
        arena: npt.NDArray[Any],
        mirror: npt.NDArray[Any],
        journal: CompiledJournal,
        num_rows: int,
        is_stale: bool,
        fields: npt.NDArray[Any],
        blocks: list[npt.NDArray[Any]],
        hand_ins: npt.NDArray[Any],
        lives: tuple[npt.NDArray[Any], ...],
        told: tuple[int, int] | None,
    ) -> None: ...
    def take(self, step: int) -> None: ...
    def undo(self, step: int) -> None: ...
    def tell(self, step: int) -> None: ...
