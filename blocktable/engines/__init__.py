"""Drop-ins: an engine's own block table classes, over ours. Nothing here is loaded by `import blocktable`."""
