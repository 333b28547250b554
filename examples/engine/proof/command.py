"""A small engine over our block tables, held against a dense cache: python examples/engine --help."""

import argparse
import os


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
    parser.add_argument("--all", action="store_true", help="every variant of this device")
    arguments = parser.parse_args()
    if arguments.device == "cpu":  # before the libraries are loaded
        for name in ("TRITON_INTERPRET", "NUMBA_ENABLE_CUDASIM", "BLOCKTABLE_CUPY_EMULATE"):
            os.environ.setdefault(name, "1")
    import torch

    from proof.ranks import run_ranks
    from proof.variants import Variant, all_variants, run

    torch.set_num_threads(1)  # of small matrices
    options = vars(arguments)
    run_all, processes = options.pop("all"), options.pop("processes")
    options["attention"] = options["attention"] or ("triton" if arguments.device == "cuda" else "torch")
    if processes:
        verdicts = [run_ranks(Variant(**options))]
    else:
        verdicts = []
        for variant in all_variants(arguments.device) if run_all else [Variant(**options)]:
            result = run(variant)
            print(result.report(variant), flush=True)
            verdicts.append(result.is_pass)
    print(f"{'PASS' if all(verdicts) else 'FAIL'}: {sum(verdicts)} of {len(verdicts)} as with a dense cache")
    return 0 if all(verdicts) else 1
