"""`blocktable replay` and `blocktable explain`, the recorder of `BlockTable.record`, and the reader of recordings.

Nothing here is imported by `import blocktable`. `Recording` is documented in docs/recording.md.
"""

from blocktable_replay.btrace import Foreign, RecordingError
from blocktable_replay.recorded import RecordedCall, Recording

__all__ = ["Foreign", "RecordedCall", "Recording", "RecordingError"]
