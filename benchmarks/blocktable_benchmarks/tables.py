"""Results as tables, the same ones for the terminal, the HTML report and the pages of figures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from blocktable_benchmarks.caller_tables import caller_tables
from blocktable_benchmarks.cells import Results, Table, is_timed, number

TARGETS = {
    "256 requests, 1 group, 32k, 1/16": (2.5, 5),
    "256 requests, 8 groups, 128k, 1/16": (12, 25),
    "1024 requests, 1 group, 128k, 1/16": (5, 10),
    "256 requests, 8 groups, 128k, all append": (25, 60),
}
"""Whole step -> how many times faster than the best peer the host must be: target, stretch."""

SLOT_TARGETS = {"decode 256 x 1": 2.0, "prefill 1 x 8192": 2.0, "prefill 1 x 65536": 2.3, "256 x 4, 8 groups": 3.3}
STEP_TARGETS = {"256 x 4, 8 groups": 6.0}
"""Microseconds of GPU time: of the slot kernel, and of a whole step."""

BANDWIDTH_TARGETS = {"1 requests": 85, "2048 requests": 75}
"""Per cent of the copy bandwidth."""


def make_tables(results: Results) -> list[Table]:
    """Return every table that has a row."""
    makers: list[Callable[[Results], list[Table]]] = [
        _machine,
        _lanes,
        caller_tables,
        _steps,
        _drop_ins,
        _slots,
        _bandwidth,
        _exports,
        _memory,
        _waits,
        _sweeps,
        _probes,
        _notes,
        _errors,
    ]
    return [table for make in makers for table in make(results) if table.rows]


def _present(results: Results, section: str) -> dict[str, dict[str, Any]]:
    return {name: lane[section] for name, lane in results["lanes"].items() if section in lane}


def _workloads(results: Results, section: str) -> list[str]:
    names: dict[str, None] = {}
    for content in _present(results, section).values():
        names.update(dict.fromkeys(content))
    return list(names)


def best_peer(results: Results, section: str, workload: str, key: str) -> float | None:
    """Return the least of the peers' figures."""
    found = [
        lane[section][workload][key]
        for lane in results["lanes"].values()
        if lane["kind"] == "peer" and is_timed(lane) and lane.get(section, {}).get(workload, {}).get(key) is not None
    ]
    return min(found, default=None)


def _machine(results: Results) -> list[Table]:
    machine = results["machine"]
    rows = [["command", results["command"]], ["date", results["date"]]]
    rows += [["a further run", command] for command in results.get("further_commands", ())]
    if results.get("is_quick"):
        rows.append(["--quick", "a smoke test over tiny sizes under the names of the large ones: nothing was timed"])
    rows += [
        [name.replace("_", " "), str(machine[name])]
        for name in ("gpu", "cuda", "processor", "cores", "system", "python")
        if name in machine
    ]
    rows.append(["versions", ", ".join(f"{name} {version}" for name, version in results["versions"].items())])
    for name, time in machine.get("empty_launch_us", {}).items():
        rows.append([f"empty launch, {name}", f"{time} us"])
    if "numpy_scatter_us" in machine:
        rows.append(["one numpy scatter of 128 entries", f"{machine['numpy_scatter_us']} us"])
    if "copy_GB_per_s" in machine:
        rows.append(
            ["device copy", f"{machine['copy_GB_per_s']:,} GB/s, {machine['copy_bytes']:,} bytes read and written"]
        )
    return [Table("machine", "The machine", ["what", "value"], rows)]


def _lanes(results: Results) -> list[Table]:
    rows = []
    for name, lane in results["lanes"].items():
        if "absent" in lane:
            rows.append([name, f"absent: {lane['absent']}"])
            continue
        said = [lane.get("description", ""), *lane.get("fallbacks", [])]
        if "host_path" in lane:
            said.append(f"host path: {lane['host_path']}")
        if lane.get("is_emulated"):
            said.append("emulated: checked, its times mean nothing")
        rows.append([name, "; ".join(text for text in said if text)])
    return [Table("lanes", "What took part", ["lane", "what it is"], rows)]


STEP_COLUMNS = [
    "",
    "host us",
    "pace",
    "many in flight us",
    "with a wait us",
    "GPU us",
    "bytes sent",
    "on the GPU",
    "x best peer, host",
    "x best peer, wait",
]


def _steps(results: Results) -> list[Table]:
    tables = []
    for workload in _workloads(results, "steps"):
        rows = []
        for name, content in _present(results, "steps").items():
            if workload in content:
                rows += _step_rows(results, name, workload)
        title = workload
        if workload in TARGETS:
            target, stretch = TARGETS[workload]
            title += f" (target {target:g}x, stretch {stretch:g}x the best peer's host time)"
        tables.append(Table("steps", title, STEP_COLUMNS, rows))
    return tables


def _step_rows(results: Results, name: str, workload: str) -> list[list[str]]:
    lane = results["lanes"][name]
    found = lane["steps"][workload]
    launches = lane.get("launches", {}).get(workload, {}).get("on_the_gpu")
    counted = [number(found.get("bytes_per_step"), 0), number(launches)]
    if not is_timed(lane):
        return [[name, "right", "-", "-", "-", "-", *counted, "-", "-"]]
    peer_host, peer_waited = (best_peer(results, "steps", workload, key) for key in ("host_us", "waited_us"))
    times = [found.get(key) for key in ("host_us", "host_no_wait_us", "waited_us", "gpu_us")]
    ratios = [_ratio(peer_host, found.get("host_us")), _ratio(peer_waited, found.get("waited_us"))]
    rows = [[name, number(times[0]), number(found.get("pace"), 2), *map(number, times[1:]), *counted, *ratios]]
    lists = found.get("host_lists_us")
    if lists is not None:
        rows.append([f"{name}, from lists", number(lists), *["-"] * 6, _ratio(peer_host, lists), "-"])
    return rows


def _ratio(peer: float | None, ours: float | None) -> str:
    return "-" if peer is None or not ours else f"{peer / ours:.1f}x"


def _drop_ins(results: Results) -> list[Table]:
    """The drop-ins beside the engine's own tables whose calls they take, all in one run."""
    run: dict[str, Any] = results.get("drop_in_lanes") or results["lanes"]
    return [table for runner in ("V1", "V2") for table in _drop_ins_of(run, runner)]


def _drop_ins_of(run: dict[str, Any], runner: str) -> list[Table]:
    lanes = {
        name: lane
        for name, lane in run.items()
        if lane["kind"] == "drop-in" and is_timed(lane) and name.startswith("drop-in, v2") is (runner == "V2")
    }
    own = {
        name: lane for name, lane in run.items() if lane["kind"] == "peer" and name.endswith(runner) and is_timed(lane)
    }
    if not lanes or not own:
        return []
    section = "drop_ins" if any("drop_ins" in lane for lane in lanes.values()) else "steps"
    rows = []
    for workload in dict.fromkeys(name for lane in lanes.values() for name in lane.get(section, {})):
        rows.append([workload, *[""] * (2 * len(own) + 4)])
        for name, lane in {**own, **lanes}.items():
            found = lane.get(section, {}).get(workload, {})
            row = [name]
            for key in ("host_us", "waited_us"):
                time = found.get(key)
                theirs = [peer.get(section, {}).get(workload, {}).get(key) for peer in own.values()]
                fastest = min((value for value in theirs if value), default=None)
                row += [number(time), *(_ratio(value, time) for value in theirs), _ratio(fastest, time)]
            rows.append(row)
    ratios = [[*(f"{what} x {name}" for name in own), f"{what} x the faster"] for what in ("host", "wait")]
    header = ["", "host us", *ratios[0], "with a wait us", *ratios[1]]
    title = f"The vLLM drop-in beside vLLM's own {runner} tables, by the same calls"
    return [Table("drop_ins" if runner == "V1" else "drop_ins_v2", title, header, rows)]


def _slots(results: Results) -> list[Table]:
    workloads = _workloads(results, "slots")
    rows = []
    for name, content in _present(results, "slots").items():
        if not any("gpu_us" in found for found in content.values()):
            continue
        row = [name]
        for workload in workloads:
            found = content.get(workload, {})
            gather = f" (+ {found['gather_us']:.1f})" if "gather_us" in found else ""
            step = f"; step {found['step_us']:.1f}" if found.get("step_us") else ""
            row.append(number(found.get("gpu_us"), 2) + gather + step)
        rows.append(row)
    header = ["", *(_slot_header(name) for name in workloads)]
    return [
        Table(
            "slots",
            "The slot kernel alone, GPU us by graph replay (+ the gather of the same batch); a whole step with it",
            header,
            rows,
        )
    ]


def _slot_header(workload: str) -> str:
    targets = [f"<= {SLOT_TARGETS[workload]}"] if workload in SLOT_TARGETS else []
    targets += [f"step <= {STEP_TARGETS[workload]}"] if workload in STEP_TARGETS else []
    return f"{workload} ({'; '.join(targets)})" if targets else workload


def _bandwidth(results: Results) -> list[Table]:
    workloads = _workloads(results, "bandwidth")
    rows = []
    for name, content in _present(results, "bandwidth").items():
        row = [name]
        for workload in workloads:
            found = content.get(workload)
            row.append(_bandwidth_cell(found))
        rows.append(row)
    header = [
        "",
        *(f"{name} (>= {BANDWIDTH_TARGETS[name]} %)" if name in BANDWIDTH_TARGETS else name for name in workloads),
    ]
    return [
        Table(
            "bandwidth",
            "16,777,216 tokens: slot kernel, 16 bytes a token, and its share of a device copy",
            header,
            rows,
        )
    ]


def _bandwidth_cell(found: dict[str, Any] | None) -> str:
    if found is None:
        return "-"
    if "impossible" in found:
        return "cannot"
    return f"{found['GB_per_s']:,.0f} GB/s, {found['share_of_copy']} %"


def _exports(results: Results) -> list[Table]:
    """One row for each case and lane; the bytes are those that groups of one geometry share."""
    rows = []
    for case in _workloads(results, "exports"):
        for name, content in _present(results, "exports").items():
            found = content.get(case)
            if found is None:
                continue
            timed = is_timed(results["lanes"][name])
            times = [number(found.get("gpu_us"), 2), number(found.get("host_us"))] if timed else ["right", "-"]
            launches = results["lanes"][name].get("export_launches", {}).get(case, {}).get("on_the_gpu")
            counted = [number(found["calls"]), number(launches), number(found["count_bytes"])]
            rows.append([f"{case}: {name}", *times, *counted])
    header = ["", "GPU us", "host us", "calls", "on the GPU", "bytes of counts"]
    title = "Exports of 256 requests of up to 250 blocks, GPU us by graph replay"
    return [Table("exports", title, header, rows)]


def _memory(results: Results) -> list[Table]:
    """One row for each workload: the parts that every backend of ours has, and what each lane takes on the device."""
    present = _present(results, "steps")
    lanes = [name for name, content in present.items() if any(found.get("device_bytes") for found in content.values())]
    rows, parts = (
        [],
        dict.fromkeys(
            part for content in present.values() for found in content.values() for part in found.get("memory", ())
        ),
    )
    for workload in _workloads(results, "steps") if lanes else ():
        ours: dict[str, int] = next(
            (content[workload]["memory"] for content in present.values() if content.get(workload, {}).get("memory")), {}
        )
        measured = [number(present[name].get(workload, {}).get("device_bytes")) for name in lanes]
        rows.append([workload, *(number(ours.get(part)) for part in parts), *measured])
    header = ["", *(part.replace("_", " ") for part in parts), *(f"{name}, on the device" for name in lanes)]
    return [Table("memory", "Bytes of a table: the parts of ours, and what was taken on the device", header, rows)]


def _waits(results: Results) -> list[Table]:
    rows = []
    for name, content in _present(results, "steps").items():
        for workload, found in content.items():
            if "steps_before_wait" in found and is_timed(results["lanes"][name]):
                waits, allocated = found["steps_before_wait"], found.get("allocations", {})
                rows.append(
                    [
                        f"{name}: {workload}",
                        "none" if waits is None else f"after {waits} steps",
                        number(allocated.get("torch_blocks")),
                        number(allocated.get("device_bytes")),
                    ]
                )
    header = ["", "waits for a busy device", "blocks from torch in 32 steps", "device bytes in 32 steps"]
    return [Table("waits", "Waits and allocations of steady steps (two steps in flight)", header, rows)]


def _sweeps(results: Results) -> list[Table]:
    tables = []
    for axis in _axes(results):
        points = sweep_points(results, axis)
        values = sorted({x for lane in points.values() for x in lane})
        rows = [
            [name, *(_sweep_cell(lane.get(x)) for x in values)]
            for name, lane in points.items()
            if is_timed(results["lanes"][name])
        ]
        tables.append(
            Table("sweep", f"Scaling over {axis}: host us / GPU us of a step", ["", *(f"{x:g}" for x in values)], rows)
        )
    return tables


def _axes(results: Results) -> list[str]:
    axes: dict[str, None] = {}
    for content in _present(results, "sweep").values():
        axes.update(dict.fromkeys(found["axis"] for found in content.values() if "axis" in found))
    return list(axes)


def sweep_points(results: Results, axis: str) -> dict[str, dict[float, dict[str, Any]]]:
    """Return lane -> value on the axis -> what was found there."""
    return {
        name: {found["x"]: found for found in content.values() if found.get("axis") == axis}
        for name, content in _present(results, "sweep").items()
    }


def _sweep_cell(found: dict[str, Any] | None) -> str:
    if found is None:
        return "-"
    return f"{number(found.get('host_us'))} / {number(found.get('gpu_us'))}"


def _probes(results: Results) -> list[Table]:
    present = _present(results, "probes")
    cases: dict[tuple[str, str], dict[str, str]] = {}
    for name, content in present.items():
        for case in content["contract"]:
            answer = "yes" if case["kept"] else f"no ({case['raised']})" if "raised" in case else "no"
            cases.setdefault((case["rule"], case["contract"]), {})[name] = answer
    rows = [
        [f"{contract} ({rule})", *(answers.get(name, "-") for name in present)]
        for (rule, contract), answers in cases.items()
    ]
    return [Table("probes", "Where peers keep our contract, and where not", ["", *present], rows)]


def _notes(results: Results) -> list[Table]:
    rows = [
        [f"{name}: {workload}", "; ".join(found.get("notes") or ["cannot: " + found["impossible"]])]
        for section in ("steps", "slots", "bandwidth", "sweep")
        for name, content in _present(results, section).items()
        for workload, found in content.items()
        if found.get("notes") or "impossible" in found
    ]
    return [Table("notes", "Right slots, but not our contract; and what a peer cannot do", ["", "what differs"], rows)]


def _errors(results: Results) -> list[Table]:
    rows = [[f"{error['lane']}: {error['where']}", error["error"]] for error in results["errors"]]
    late: dict[tuple[str, str], list[str]] = {}
    for entry in results.get("not_run", ()):
        late.setdefault((entry["lane"], entry["reason"]), []).append(entry["where"])
    not_run = [[name, f"{reason}: {', '.join(places)}"] for (name, reason), places in late.items()]
    return [
        Table("errors", "What failed", ["", "error"], rows),
        Table("errors", "What was not run", ["", "reason"], not_run),
    ]
