"""Builds the compiled host path where a C++ compiler is; where none is, the wheel is without it, and says so."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import tempfile
import textwrap
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = Path("extras", "blocktable_compiled")
MODULES = ("arguments", "journal", "operations", "drop_in", "steps", "holders", "checks", "launching")


class CompiledHostPath(BuildHookInterface[Any]):
    """Compiles each module of Cython beside its source, where an editable install and a wheel find it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build what is older than its source; all modules or none."""
        if self.target_name != "wheel":
            return
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        sources = [Path(self.root, PACKAGE, f"{name}.pyx") for name in MODULES]
        shared = [Path(__file__), *Path(self.root, PACKAGE).glob("*.pxd")]
        targets = [source.with_name(source.stem + suffix) for source in sources]
        try:
            for source, target in zip(sources, targets, strict=True):
                if not is_newer(target, source, *shared):
                    build(source, target)
        except (Exception, SystemExit) as error:
            for target in targets:  # an old one must not run with new Python beside it
                target.unlink(missing_ok=True)
            self.app.display_warning(
                "The compiled host path, which needs a C++ compiler, is left out and the numpy one runs: "
                f"{source.name} could not be built ({type(error).__name__}: {textwrap.shorten(str(error), 80)})."
            )
            return
        for target in targets:
            build_data["force_include"][str(target)] = f"{PACKAGE.name}/{target.name}"
        build_data["pure_python"] = False
        build_data["infer_tag"] = True


def is_newer(target: Path, *sources: Path) -> bool:
    """Return whether a file exists and is at least as new as all it was made from."""
    return target.exists() and target.stat().st_mtime >= max(source.stat().st_mtime for source in sources)


def build(source: Path, target: Path) -> None:
    """Compile one module of Cython."""
    import numpy as np
    from Cython.Build import cythonize
    from setuptools import Distribution, Extension

    with tempfile.TemporaryDirectory() as folder:
        options = ["/O2", "/std:c++17"] if sys.platform == "win32" else ["-O3", "-std=c++17", "-g0"]
        extension = Extension(
            f"{PACKAGE.name}.{source.stem}",
            [os.path.relpath(source)],  # as tracebacks show it
            include_dirs=[np.get_include()],
            define_macros=[("NPY_NO_DEPRECATED_API", "NPY_2_0_API_VERSION")],
            extra_compile_args=options,
            language="c++",
        )
        distribution = Distribution(
            {"ext_modules": cythonize([extension], include_path=[str(source.parents[1])], build_dir=folder, quiet=True)}
        )
        command = distribution.get_command_obj("build_ext")
        command.build_lib, command.build_temp = folder, folder
        command.ensure_finalized()
        command.run()
        # In one step: a process that runs the old one keeps its file, and none sees half of the new one.
        fresh = target.with_name(f"{target.name}.{os.getpid()}.so")
        shutil.copy(command.get_ext_fullpath(extension.name), fresh)
        fresh.replace(target)
