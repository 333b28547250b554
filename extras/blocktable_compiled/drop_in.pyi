import numpy as np
import numpy.typing as npt

def append_to_all_groups(
    rows: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    ids: npt.NDArray[np.int32],
    tables: npt.NDArray[np.int64],
    num_rows: int,
    mirror: npt.NDArray[np.int32],
    offsets: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
) -> int: ...
