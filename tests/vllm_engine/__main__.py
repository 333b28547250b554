"""Whole vLLM on a CPU, its own tables and ours compared: python tests/vllm_engine --help."""

import sys

from comparison import main

if __name__ == "__main__":
    sys.exit(main())
