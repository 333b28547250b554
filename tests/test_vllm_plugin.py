"""The plugin, in a vLLM that is a tree of stand-in modules: on, off, and refused."""

import importlib.metadata
import importlib.util
import logging
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import blocktable as bt
from blocktable_vllm import make_settings, register
from blocktable_vllm.plugin import CLASSES, KERNELS, MODULE, install

ROOT = Path(__file__).parents[1]

needs_torch = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed: tox -e vllm")


def add_module(monkeypatch: pytest.MonkeyPatch, name: str, **names: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, name, module)
    return module


class Tree:
    """vLLM as far as the plugin looks at it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, version: str, **lacks: None) -> None:
        self.table, self.multi = type("BlockTable", (), {}), type("MultiGroupBlockTable", (), {})
        names: dict[str, Any] = {"BlockTable": self.table, "MultiGroupBlockTable": self.multi, "cdiv": len}
        kernel = KERNELS.get(version.partition("+")[0])
        if kernel is not None:
            names[kernel] = object()
        self.top = add_module(monkeypatch, "vllm", __version__=version)
        for name in ("vllm.v1", "vllm.v1.worker"):
            add_module(monkeypatch, name)
        self.module = add_module(
            monkeypatch, MODULE, **{name: value for name, value in names.items() if name not in lacks}
        )
        self.user = add_module(monkeypatch, "vllm.v1.worker.gpu_input_batch", MultiGroupBlockTable=self.multi, n=3)
        self.stranger = add_module(monkeypatch, "someone_else", BlockTable=self.table)
        self.before = [dict(vars(module)) for module in self.modules]

    @property
    def modules(self) -> list[ModuleType]:
        return [self.top, self.module, self.user, self.stranger]

    @property
    def is_untouched(self) -> bool:
        return [dict(vars(module)) for module in self.modules] == self.before


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("", "_MODE", "_BACKEND", "_CLEAN_TAILS"):
        monkeypatch.delenv(f"BLOCKTABLE_VLLM{name}", raising=False)


@pytest.mark.parametrize("value", [None, "", "0"])
def test_off_it_does_nothing(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    tree = Tree(monkeypatch, "0.25.1")
    if value is not None:
        monkeypatch.setenv("BLOCKTABLE_VLLM", value)
    register()
    assert tree.is_untouched


def test_off_it_imports_no_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    source = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    source += "from blocktable_vllm import register; register(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert done.stdout == "False\n", done.stderr


@pytest.mark.parametrize("version", ["0.25.0", "0.25.2", "0.33.0rc1", "0.34.0", "1.0", "dev"])
def test_an_unknown_version_is_left_alone_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    tree = Tree(monkeypatch, version)
    monkeypatch.setenv("BLOCKTABLE_VLLM", "1")
    with caplog.at_level(logging.WARNING, "blocktable"):
        register()
    assert tree.is_untouched
    (record,) = caplog.records
    assert f"vLLM {version}" in record.message
    assert "0.25.1 and 0.33.0" in record.message
    assert record.message.endswith("vLLM keeps its own tables.")


@pytest.mark.parametrize("lacking", ["MultiGroupBlockTable", KERNELS["0.25.1"]])
def test_a_module_that_is_not_the_versions_own_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lacking: str
) -> None:
    tree = Tree(monkeypatch, "0.25.1", **{lacking: None})
    monkeypatch.setenv("BLOCKTABLE_VLLM", "1")
    register()
    assert tree.is_untouched
    assert lacking in caplog.text


@pytest.mark.parametrize(
    ("name", "value"),
    [("BLOCKTABLE_VLLM", "yes"), ("BLOCKTABLE_VLLM_MODE", "quick"), ("BLOCKTABLE_VLLM_CLEAN_TAILS", "2")],
)
def test_an_impossible_variable_is_an_error(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    tree = Tree(monkeypatch, "0.25.1")
    monkeypatch.setenv("BLOCKTABLE_VLLM", "1")
    monkeypatch.setenv(name, value)
    with pytest.raises(bt.ConfigError, match=name):
        register()
    assert tree.is_untouched


@needs_torch
@pytest.mark.parametrize("version", ["0.25.1", "0.33.0+cu129"])
def test_on_every_name_of_vllms_classes_is_ours(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    tree = Tree(monkeypatch, version)
    monkeypatch.setenv("BLOCKTABLE_VLLM", "1")
    register()
    table, multi = (getattr(tree.module, name) for name in CLASSES)
    assert table is not tree.table
    assert multi is not tree.multi
    assert multi.__table_type__ is table
    assert table.__home__ is tree.module
    assert tree.user.MultiGroupBlockTable is multi
    assert tree.user.n == 3
    assert tree.stranger.BlockTable is tree.table
    register()  # vLLM may load its plugins again in the same process
    assert [getattr(tree.module, name) for name in CLASSES] == [table, multi]


@needs_torch
def test_on_the_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = Tree(monkeypatch, "0.33.0")
    for name, value in (("_MODE", "strict"), ("_BACKEND", "numpy")):
        monkeypatch.setenv(f"BLOCKTABLE_VLLM{name}", value)
    install()
    assert tree.module.BlockTable.__settings__ == ("0.33.0", "strict", "numpy", False)


def test_settings_keywords_go_before_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKTABLE_VLLM_MODE", "strict")
    monkeypatch.setenv("BLOCKTABLE_VLLM_BACKEND", "cupy")
    assert make_settings("0.25.1") == ("0.25.1", "strict", "cupy", False)
    assert make_settings("0.25.1", "fast", "numpy", True) == ("0.25.1", "fast", "numpy", True)
    with pytest.raises(bt.ConfigError, match="Strict mode keeps tails"):
        make_settings("0.25.1", clean_tails=True)


def test_without_vllm_a_profile_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(bt.UnsupportedError, match=r"name a profile, 0\.25\.1 or 0\.33\.0"):
        make_settings()


def test_the_entry_point_is_vllms_and_names_the_plugin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (target,) = project["entry-points"]["vllm.general_plugins"].values()
    entry = importlib.metadata.EntryPoint("blocktable", target, "vllm.general_plugins")
    assert entry.load() is register
