"""`blocktable replay`: drive the whole library with a serving trace, and prove every step (docs/replay.md).

Nothing here is imported by `import blocktable`.
"""
