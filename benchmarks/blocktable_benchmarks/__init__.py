"""Benchmarks of block tables: ours over every backend, and the engines' own in the same run (docs/performance.md).

`blocktable bench` is the way in. Each lane (one backend, or one peer) runs in a process of its own: two versions of one
engine cannot live in one, and a lane that breaks the GPU's context loses nothing but itself.
"""
