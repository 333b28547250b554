"""Serves requests through block tables and holds their tokens against a dense cache: python examples/engine --help."""

import sys

from proof.command import main

if __name__ == "__main__":
    sys.exit(main())
