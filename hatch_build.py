"""Builds the compiled host path where a C++ compiler is; where none is, the wheel is without it, and says so."""

from __future__ import annotations

import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = Path("extras", "blocktable_compiled")
MODULES = ("operations", "steps")


class CompiledHostPath(BuildHookInterface[Any]):
    """Compiles each module of Cython beside its source."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build what is older than its source; an editable install and a wheel find it in the same place."""
        if self.target_name != "wheel":
            return
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        for name in MODULES:
            source = Path(self.root, PACKAGE, f"{name}.pyx")
            built = source.with_name(name + suffix)
            if not built.exists() or built.stat().st_mtime < source.stat().st_mtime:
                try:
                    build(source, built)
                except (Exception, SystemExit) as error:
                    self.app.display_warning(
                        f"The compiled host path is left out, and the numpy one runs: {source.name} could not be "
                        f"built ({type(error).__name__}: {error})."
                    )
                    return
            place = built.relative_to(Path(self.root))
            build_data["force_include"][str(built)] = f"{PACKAGE.name}/{place.name}"
        build_data["pure_python"] = False
        build_data["infer_tag"] = True


def build(source: Path, built: Path) -> None:
    """Compile one module of Cython."""
    import numpy as np
    from Cython.Build import cythonize
    from setuptools import Distribution, Extension

    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copy(source, folder))
        options = ["/O2", "/std:c++17"] if sys.platform == "win32" else ["-O3", "-std=c++17", "-g0"]
        extension = Extension(
            f"{PACKAGE.name}.{source.stem}",
            [str(copy)],
            include_dirs=[np.get_include()],
            define_macros=[("NPY_NO_DEPRECATED_API", "NPY_2_0_API_VERSION")],
            extra_compile_args=options,
            language="c++",
        )
        distribution = Distribution({"ext_modules": cythonize([extension], quiet=True)})
        command = distribution.get_command_obj("build_ext")
        command.build_lib, command.build_temp = folder, folder
        command.ensure_finalized()
        command.run()
        shutil.copy(command.get_ext_fullpath(extension.name), built)
