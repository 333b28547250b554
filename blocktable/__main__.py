"""`python -m blocktable` is the command `blocktable`."""

import sys

from blocktable.cli import main

sys.exit(main())
