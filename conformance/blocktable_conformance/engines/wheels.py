"""Lay files of released packages out so that they import alone, beside small stand-ins for what they import.

The wheels come from the package index through pip. What is laid out is for trying and measuring on one's own machine,
and is never committed.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from blocktable_conformance.engines.packages import Package

PLATFORM = ["--only-binary=:all:", "--no-deps", "--implementation=cp", "--python-version=3.11"] + [
    f"--platform=manylinux_2_{glibc}_x86_64" for glibc in (34, 31, 28, 24)
]
"""One wheel for every machine: what is taken of it is Python."""


class WrongFileError(ValueError):
    """A released file is not the one that the adapter was written for."""


def is_laid_out(package: Package, destination: Path) -> bool:
    """Say whether every file is there, as it was released, and every stand-in as it stands here."""
    for name, digest in package.files.items():
        place = destination / name
        if not place.is_file() or hashlib.sha256(place.read_bytes()).hexdigest() != digest:
            return False
    return all(
        (destination / name).is_file() and (destination / name).read_text() == source.lstrip()
        for name, source in package.standins.items()
    )


def lay_out(package: Package, destination: Path) -> None:
    """Take a package's files out of its released wheel and put its stand-ins beside them; nothing where they are there.

    Args:
        package: what to take.
        destination: folder, to be an entry of `sys.path`; what is there under the same names is replaced.

    Raises:
        subprocess.CalledProcessError: pip cannot get the wheel.
        WrongFileError: a file has another digest.
    """
    if is_laid_out(package, destination):
        return
    contents = {name: source.lstrip().encode() for name, source in package.standins.items()}
    contents |= _released(package)
    folders = {parent for name in contents for parent in Path(name).parents if parent.name}
    for name, content in contents.items():
        place = destination / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    for folder in folders:
        (destination / folder / "__init__.py").touch()
    version = destination / (package.module or package.name) / "__init__.py"
    if version.is_file() and not version.read_bytes():
        version.write_text(f'__version__ = "{package.version}"\n')


def _released(package: Package) -> dict[str, bytes]:
    """Return the files of the wheel, each with the digest that is expected of it."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["download", "--quiet", *PLATFORM, "--dest", folder, f"{package.name}=={package.version}"]
        subprocess.run([sys.executable, "-m", "pip", *command], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            contents = {name: archive.read(name) for name in package.files}
    for name, content in contents.items():
        digest = hashlib.sha256(content).hexdigest()
        if digest != package.files[name]:
            raise WrongFileError(
                f"{name} of {package.name} {package.version} has the digest {digest}, and {package.files[name]} is "
                "expected: look at what changed before you change engines/packages.py."
            )
    return contents
