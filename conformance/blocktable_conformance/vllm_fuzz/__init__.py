"""A differential fuzzer: vLLM's own V1 tables and the drop-in's on the same random histories, compared after each call.

    python -m blocktable_conformance.vllm_fuzz --peers DIR --profile 0.25.1 --mode fast --backend numpy --calls 100000

DIR holds `vllm-<version>/vllm`, as `python -m blocktable_benchmarks.peers.lay_out DIR` lays it out. On the CPU vLLM's
kernel runs in Triton's interpreter.
"""
