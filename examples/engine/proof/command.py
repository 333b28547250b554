"""A small engine over our block tables, held against a dense cache: python examples/engine --help."""

from __future__ import annotations

import argparse
import os
import traceback
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proof.variants import Variant


def main() -> int:
    parser = argparse.ArgumentParser(prog="python examples/engine", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--backend", default="numpy", help="of the block tables; on a CPU the others are emulated")
    parser.add_argument("--rows", choices=("stable", "dense"), default="stable")
    parser.add_argument("--graphs", choices=("on", "off"), default="off", help="decode by CUDA graphs")
    parser.add_argument("--attention", choices=("torch", "triton"), help="default: torch on a CPU, triton on a GPU")
    parser.add_argument("--world-size", type=int, default=1, help="context-parallel ranks")
    parser.add_argument("--interleave-size", type=int, default=1, help="tokens that a rank holds in turn")
    parser.add_argument("--processes", action="store_true", help="a process and a device for each rank: gloo, or NCCL")
    parser.add_argument(
        "--diverge-at", type=int, metavar="STEP", help="with --processes: make a rank's table wrong there"
    )
    parser.add_argument("--encoder-decoder", action="store_true", help="serve an encoder-decoder, over a cross group")
    parser.add_argument(
        "--requests", type=int, nargs="+", choices=range(16), metavar="N", help="serve these alone, show wrong tokens"
    )
    parser.add_argument("--record", metavar="FILE", help="record the first rank's table (blocktable replay FILE)")
    parser.add_argument("--all", action="store_true", help="every variant of this device")
    arguments = parser.parse_args()
    is_one_run = not (arguments.all or arguments.processes or arguments.encoder_decoder)
    if (arguments.requests or arguments.record) and not is_one_run:
        parser.error("--requests and --record want one run in this process: no --all, --processes, --encoder-decoder")
    if arguments.device == "cpu":  # before the libraries are loaded
        for name in ("TRITON_INTERPRET", "NUMBA_ENABLE_CUDASIM", "BLOCKTABLE_CUPY_EMULATE"):
            os.environ.setdefault(name, "1")
    import torch

    from proof.ranks import run_ranks
    from proof.variants import Variant, all_variants

    torch.set_num_threads(1)  # of small matrices
    options = vars(arguments)
    run_all, processes, encoder_decoder, diverge_at = (
        options.pop(name) for name in ("all", "processes", "encoder_decoder", "diverge_at")
    )
    numbers, record = options.pop("requests"), options.pop("record")
    options["attention"] = options["attention"] or ("triton" if arguments.device == "cuda" else "torch")
    chosen = Variant(**options)
    if processes:
        verdicts = [run_ranks(chosen, diverge_at)]
    elif run_all:
        verdicts = [serve(variant) for variant in all_variants(arguments.device)]
        backends = ("numpy", "triton", "cupy", "numba")
        verdicts += [serve(replace(chosen, backend=backend), encoder_decoder=True) for backend in backends]
        num_devices = torch.cuda.device_count() if arguments.device == "cuda" else 4
        backend = "triton" if arguments.device == "cuda" else "numpy"
        for size in (2, 4):
            if size <= num_devices:
                verdicts.append(run_ranks(replace(chosen, backend=backend, world_size=size, interleave_size=16)))
            else:
                print(f"NOT RUN {size} ranks over NCCL: they want as many GPUs, and torch sees {num_devices}")
    elif numbers:
        verdicts = [serve_some(chosen, numbers, record)]
    else:
        verdicts = [serve(chosen, encoder_decoder=encoder_decoder, record=record)]
    print(f"{'PASS' if all(verdicts) else 'FAIL'}: {sum(verdicts)} of {len(verdicts)} as with a dense cache")
    return 0 if all(verdicts) else 1


def serve_some(variant: Variant, numbers: list[int], record: str | None) -> bool:
    """Print where the tokens of each sample leave those of a dense cache, or what the table's checker raised."""
    from blocktable import CheckError
    from proof.variants import run, truth

    try:
        result = run(variant, numbers=numbers, record=record)
    except CheckError as error:
        print(f"step {error.finding.step}: {error}")
        return False
    for name, wanted in (item for number in numbers for item in truth(variant.device, number).items()):
        got = result.finished[name]
        first = next((i for i, pair in enumerate(zip(got, wanted, strict=True)) if pair[0] != pair[1]), None)
        verdict = "all right"
        if first is not None:
            verdict = f"{got[first:][:4]} from token {first} on, not {wanted[first:][:4]}"
        print(f"request {name[0]}, sample {name[1]}, {len(wanted)} tokens: {verdict}")
    for finding in result.findings:
        print(f"step {finding.step}: {finding.message}")
    return not (result.wrong or result.findings)


def serve(variant: Variant, *, encoder_decoder: bool = False, record: str | None = None) -> bool:
    """Print what comes of a variant, an exception too, so that the ones after it are still seen."""
    from proof.encoder_decoder import report_encoder_decoder
    from proof.variants import run

    try:
        if encoder_decoder:
            is_pass, report = report_encoder_decoder(variant)
        else:
            result = run(variant, record=record)
            is_pass, report = result.is_pass, result.report(variant)
    except Exception:
        traceback.print_exc()
        is_pass, report = False, f"FAIL {variant}: an exception"
    print(report, flush=True)
    return is_pass
