"""Finding backends: entry points, and what is said when one cannot be had."""

import itertools
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import blocktable as bt
from blocktable.backend import PROTOCOL_VERSION, Backend

_numbers = itertools.count()

BACKEND = """
    class Backend:
        name = "made-up"
        protocol_version = 2
        capabilities = frozenset()
        instances = 0
        def __init__(self):
            type(self).instances += 1
        def why_unavailable(self): return None
        def create_block_store(self, config, device=None): ...
        def create_slot_mapper(self, store): ...
        def from_host(self, array, device=None): return array
        def to_host(self, array): return array
        def synchronize(self, device=None): ...
"""

Install = Callable[..., str]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a distribution that offers a backend onto sys.path, as pip would, and return the backend's name."""

    def install(source: str = BACKEND, *, target: str = "Backend", name: str | None = None) -> str:
        number = next(_numbers)
        name = name or f"made-up-{number}"
        site = tmp_path / f"site{number}"
        info = site / f"made_up_{number}-1.{number}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: made-up-{number}\nVersion: 1.{number}\n")
        (info / "entry_points.txt").write_text(f"[blocktable.backends]\n{name} = made_up_{number}:{target}\n")
        (site / f"made_up_{number}.py").write_text(textwrap.dedent(source))
        monkeypatch.syspath_prepend(site)
        return name

    return install


def test_numpy_enters_by_its_entry_point() -> None:
    (info,) = [info for info in bt.list_backends() if info.name == "numpy"]
    assert (info.distribution, info.version) == ("blocktable", bt.__version__)
    assert info.value == "blocktable_numpy:NumpyBackend"


def test_a_backend_is_loaded_once() -> None:
    backend = bt.get_backend("numpy")
    assert backend is bt.get_backend("numpy")
    assert isinstance(backend, Backend)
    assert backend.name == "numpy"


def test_anybodys_backend_enters_by_the_same_door(install: Install) -> None:
    name = install()
    assert name in [info.name for info in bt.list_backends()]
    assert bt.get_backend(name).name == "made-up"


def test_an_entry_point_may_name_an_instance(install: Install) -> None:
    assert bt.get_backend(install(BACKEND + "\n    instance = Backend()\n", target="instance")).name == "made-up"


def test_module_and_class_name_a_backend_that_is_not_installed() -> None:
    assert bt.get_backend("blocktable_numpy:NumpyBackend").name == "numpy"


def test_listing_loads_none(install: Install) -> None:
    name = install("raise SystemExit('loaded')")
    assert name in [info.name for info in bt.list_backends()]


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(bt.UnknownBackendError, match=r"'nope'.*installed:.*numpy") as caught:
        bt.get_backend("nope")
    assert isinstance(caught.value, LookupError)


def test_two_distributions_with_one_name_are_refused_with_both_named(install: Install) -> None:
    name = install()
    install(name=name)
    offers = [info.distribution for info in bt.list_backends() if info.name == name]
    with pytest.raises(bt.UnknownBackendError, match=f"{offers[0]} and by {offers[1]}"):
        bt.get_backend(name)


@pytest.mark.parametrize("wrong", [None, 3, bt])
def test_a_name_is_a_string(wrong: object) -> None:
    with pytest.raises(bt.UnknownBackendError, match="by name"):
        bt.get_backend(wrong)  # type: ignore[arg-type]


def test_another_protocol_version_is_refused_with_both_versions(install: Install) -> None:
    name = install(BACKEND.replace("protocol_version = 2", "protocol_version = 7"))
    with pytest.raises(bt.BlockTableError, match=rf"version 7.*version {PROTOCOL_VERSION}"):
        bt.get_backend(name)


def test_a_capability_that_does_not_exist_is_refused(install: Install) -> None:
    name = install(BACKEND.replace("frozenset()", "frozenset({'flying'})"))
    with pytest.raises(bt.BlockTableError, match=r"flying.*choose from.*graph_capture"):
        bt.get_backend(name)


def test_what_is_no_backend_is_refused_with_what_it_lacks(install: Install) -> None:
    with pytest.raises(bt.BlockTableError, match="why_unavailable"):
        bt.get_backend(install("class Backend:\n    name = 'half'\n"))


def test_a_backend_that_cannot_run_says_why(install: Install) -> None:
    name = install(BACKEND.replace("return None", "return 'no device; plug one in.'", 1))
    with pytest.raises(bt.BackendUnavailableError, match=r"no device; plug one in\.") as caught:
        bt.get_backend(name)
    assert isinstance(caught.value, ImportError)


@pytest.mark.parametrize("source", ["import no_such_library", "raise OSError('no such driver')"])
def test_a_backend_that_cannot_be_loaded_is_named_with_the_reason(install: Install, source: str) -> None:
    name = install(source)
    with pytest.raises(bt.BackendUnavailableError, match=rf"'{name}'.*no.such.*Install what it needs"):
        bt.get_backend(name)


def test_an_entry_point_that_leads_nowhere_says_where_it_led(install: Install) -> None:
    with pytest.raises(bt.UnknownBackendError, match="has no attribute 'Backend'"):
        bt.get_backend(install("class Other: ..."))


@pytest.mark.parametrize("name", ["blocktable_numpy:", ":NumpyBackend"])
def test_half_a_module_and_class_is_refused_with_the_form(name: str) -> None:
    with pytest.raises(bt.UnknownBackendError, match=r"package\.module:Class"):
        bt.get_backend(name)


def test_a_slip_of_the_pen_is_answered_with_the_name_that_was_meant() -> None:
    with pytest.raises(bt.UnknownBackendError, match="did you mean 'numpy'"):
        bt.get_backend("Numpy")


def test_a_failure_is_not_remembered(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    name = install(BACKEND.replace("return None", "return __import__('os').environ.get('MADE_UP_REASON')", 1))
    monkeypatch.setenv("MADE_UP_REASON", "not yet.")
    with pytest.raises(bt.BackendUnavailableError, match="not yet"):
        bt.get_backend(name)
    monkeypatch.delenv("MADE_UP_REASON")
    assert bt.get_backend(name).name == "made-up"


def test_many_threads_ask_at_once(install: Install) -> None:
    """Rules: R23."""
    name, start, found = install(), threading.Barrier(16), []

    def ask() -> None:
        start.wait()
        found.append(bt.get_backend(name))

    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 16
    assert len(set(map(id, found))) == 1
    assert type(found[0]).instances == 1  # type: ignore[attr-defined]


def test_a_table_takes_a_backend_object_or_class_and_checks_it() -> None:
    config = bt.BlockTableConfig(
        groups=[bt.KVCacheGroup(block_size=16)], max_num_reqs=1, max_num_batched_tokens=1, max_model_len=16
    )
    assert bt.BlockTable(config, backend=bt.get_backend("numpy")).backend is bt.get_backend("numpy")
    assert bt.BlockTable(config, backend=type(bt.get_backend("numpy"))).backend.name == "numpy"  # type: ignore[arg-type]
    with pytest.raises(bt.BlockTableError, match="is not a backend"):
        bt.BlockTable(config, backend=object())  # type: ignore[arg-type]
