"""vLLM on a CPU, imported once: each engine is a forked process, with vLLM's own tables or the drop-in's."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import logging
import os
import pickle
import tempfile
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import faults
from scenarios import Scenario
from watching import watch

ENVIRONMENT = {
    # Both runners' Triton kernels run in the interpreter, as they are.
    "TRITON_INTERPRET": "1",
    "BLOCKTABLE_CUPY_EMULATE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "NUMBA_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
MODULES = ("vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker", "vllm.v1.worker.cpu.model_runner")
"""Imported before the forks."""
TIMEOUT = 600.0
"""Seconds of one engine."""


class Side(NamedTuple):
    """Whose tables an engine has.

    Attributes:
        runner: "V1" or "V2".
        variables: BLOCKTABLE_VLLM and its kin; without the first one the tables are vLLM's own.
        fault: the name of a fault in `faults`, put into the drop-in. None: none.
        is_as_on_gpu: whether the V1 runner's tables keep a device copy. On a CPU its runner takes it away from them.
    """

    runner: str
    variables: dict[str, str]
    fault: str | None = None
    is_as_on_gpu: bool = True


class Outcome(NamedTuple):
    """What an engine left.

    Attributes:
        tokens: what came out of it.
        trace: one entry for each call of its tables that a kernel follows (`watching`).
        tables: the name of the tables' module.
        findings: what the checker logged as errors.
        is_checked: whether the checker has seen any row.
        is_in_log: whether vLLM's own log says that the tables are ours.
        error: the end of a traceback. None: there was none.
        seconds: taken.
    """

    tokens: Any
    trace: list[Any]
    tables: str
    findings: list[str]
    is_checked: bool
    is_in_log: bool
    error: str | None
    seconds: float


def import_vllm() -> str:
    """Import vLLM so that both runners run here, and return its version."""
    os.environ.update(ENVIRONMENT)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    import triton.backends
    from triton.runtime.interpreter import InterpreterBuilder

    # vLLM asks for its version by a name that the CPU build does not have, and for a Triton backend "cpu".
    metadata: Any = importlib.metadata
    ask = metadata.version
    metadata.version = lambda name: f"{ask('vllm-cpu')}+cpu" if name == "vllm" else ask(name)
    backends = triton.backends.backends
    for backend in backends.values():
        if backend.driver:
            backend.driver.is_active = staticmethod(lambda: False)
    backends["cpu"] = types.SimpleNamespace(driver=None, compiler=None)
    # The interpreter of triton 3.9 makes int32 of a scalar mask and a block's together.
    for name in ("create_masked_load", "create_masked_store"):
        setattr(InterpreterBuilder, name, _with_bool_mask(getattr(InterpreterBuilder, name)))
    for name in MODULES:
        importlib.import_module(name)
    import vllm
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda function: function()  # 15 s a start
    version: str = vllm.__version__
    return version


def _with_bool_mask(method: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        mask = signature.bind(*args, **kwargs).arguments["mask"]
        mask.data = mask.data.astype(bool)
        return method(*args, **kwargs)

    return call


class Engine:
    """One engine in a forked process.

    Args:
        scenario: what it serves.
        side: its tables.
        models: folder of models, by name.
    """

    def __init__(self, scenario: Scenario, side: Side, models: Path) -> None:
        self._started = time.monotonic()
        with tempfile.NamedTemporaryFile(suffix=".engine", delete=False) as file:
            self._path = Path(file.name)
        self._log = self._path.with_suffix(".log")
        self.pid = os.fork()
        if not self.pid:
            self._serve(scenario, side, models)

    def _serve(self, scenario: Scenario, side: Side, models: Path) -> None:
        log = os.open(self._log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            outcome = _serve(scenario, side, models)
        except BaseException:
            outcome = _nothing(traceback.format_exc())
        said = f"Block tables of the {side.runner} runner are blocktable's"
        outcome = outcome._replace(is_in_log=said in self._log.read_text(errors="replace"))
        self._path.write_bytes(pickle.dumps(outcome))
        os._exit(0)

    def is_late(self) -> bool:
        """Whether it has taken longer than any engine may."""
        return time.monotonic() - self._started > TIMEOUT

    def outcome(self) -> Outcome:
        """Return what it left, once its process has ended."""
        seconds = time.monotonic() - self._started
        try:
            found: Outcome = pickle.loads(self._path.read_bytes())  # what our own child wrote
        except EOFError:
            found = _nothing("It died. " + self._log.read_text(errors="replace"))
        for path in (self._path, self._log):
            path.unlink(missing_ok=True)
        return found._replace(seconds=seconds)


def _nothing(error: str) -> Outcome:
    return Outcome(None, [], "", [], is_checked=False, is_in_log=False, error=error[-3000:], seconds=0.0)


class _Findings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def _serve(scenario: Scenario, side: Side, models: Path) -> Outcome:
    """Serve a scenario in this process."""
    os.environ.update(side.variables, VLLM_USE_V2_MODEL_RUNNER=str(int(side.runner == "V2")))
    from vllm import LLM
    from vllm.plugins import load_general_plugins

    load_general_plugins()  # as an engine does, and here before the tables are looked at
    if side.runner == "V1":
        from vllm.v1.worker import gpu_input_batch

        kind = gpu_input_batch.MultiGroupBlockTable
        if side.is_as_on_gpu:
            _keep_device_copies()
    else:
        from vllm.v1.worker.gpu import model_runner

        kind = model_runner.BlockTables
    if side.fault is not None:
        faults.of(side.runner, side.fault)(kind)
    trace, seen = watch(kind, side.runner)
    work = scenario.work if side.runner == "V1" else scenario.v2_work
    assert work is not None
    options = {name: value for name, value in scenario.options.items() if value is not None}
    llm = LLM(**{**options, "model": str(models / options["model"])})
    findings = _Findings()
    logging.getLogger("vllm.blocktable.check").addHandler(findings)  # vLLM has set its log up by now
    tokens = work(llm)
    check = getattr(seen[-1], "__check__", None) if seen else None
    is_checked = check is not None and check.table is not None
    return Outcome(tokens, trace, kind.__module__, findings.said, is_checked, is_in_log=False, error=None, seconds=0.0)


def _keep_device_copies() -> None:
    """Keep vLLM's CPU runner from putting the host's rows in the place of the device's in the tables."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    postprocess = CPUModelRunner._postprocess_tensors

    def keep(self: Any) -> None:
        multi = self.input_batch.block_table
        tables, multi.block_tables = multi.block_tables, []
        try:
            postprocess(self)
        finally:
            multi.block_tables = tables

    CPUModelRunner._postprocess_tensors = keep
