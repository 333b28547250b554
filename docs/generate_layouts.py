"""Write docs/layouts.md: who reads which layout, from the descriptors of `blocktable.layouts`.

python docs/generate_layouts.py
"""

from __future__ import annotations

import sys
from pathlib import Path

from blocktable.layouts import KINDS, LAYOUTS, Kind, Layout

PAGE = Path(__file__).parents[1] / "docs/layouts.md"
COMMAND = "python docs/generate_layouts.py"

HEAD = f"""\
# Who reads which layout

<!-- Written by `{COMMAND}` from blocktable/layouts.py: change that and run it. -->

Attention kernels do not read block tables alike. Each row below is one consumer, and the array that it reads in place
of a table; `table.export(name, ...)` writes that array ([the contract, R25 to R31](spec.md#exports)), and
`blocktable.plan_width(config, names)` finds the least width that satisfies several of them (R32):

<!-- plan -->
```python
import blocktable as bt

config = bt.BlockTableConfig(
    groups=[bt.KVCacheGroup(block_size=48, kernel_block_size=16)],
    max_num_reqs=8,
    max_num_batched_tokens=64,
    max_model_len=144,
)
plan = bt.plan_width(config, ["flash_attention_3", "vllm_table"])
print(plan.width, plan.width_alignment)  # 16 128
print(plan.rule)  # vllm_table: M * kernel_block_size a multiple of 128 tokens, so M a multiple of 8
```

Versions move: these are the rules that the sources named below had in November 2026. `Layout` describes one of your
own.

## The layouts

"Block size" is `kernel_block_size`, what most of these kernels call page size. M is the width in columns, B the
batch rows, S the state columns, N the kernel blocks of the cache, n the entries of all requests, T the tokens.
"strict": contiguous with canonical strides; "rows": the entries of a row lie side by side, rows may be apart.
"null" is the entry of a place that holds no block: -1 where the consumer tests for it; "filler" where it reads
entries past the length and only needs a valid address: the group's filler, or block 0 where that is -1
([R25.7](spec.md#exports)). A group with `null_block_id=-1` therefore hands its raw batch table, which holds -1, to
those alone who test for -1 or stop at the length, as torch's PagedAttention and nano-vllm do; vLLM's Triton kernel
and FlashAttention 3 do not, and get a copy.
"""

KIND_NOTES: dict[Kind, str] = {
    "table": "the batch table itself, uncopied, where dtype, width and what stands for no block are the table's (R26)",
    "kv_offsets": "`entry_scale` and `value_offset` are the cache's (R29)",
    "csr": "with `indptr [B + 1]` and `last_page_lens [B]`, on the device (R27)",
    "token_csr": "a page is one token: indices are slots (R28)",
    "lengths": "also beside every CSR, as `lengths` (R27)",
    "inverse_map": "-1 for a block that the request does not hold (R30)",
    "state": "`num_columns` is 1 + the speculative tokens (R31)",
    "placeholder": "nothing is launched (R26)",
    "ring": "with `seq_lens`; what was overwritten, or a window left, is not there (R35)",
    "token_requests": "with `query_start_loc`; `indptr [B + 1]` holds the padded starts (R35)",
    "block_requests": "beside the indices of a CSR of the same batch (R35)",
}

KERNELS = """
## Checked with the kernels themselves

Kernels that are not ours read these layouts in a test, laid out from vLLM's released wheels (never part of this
project) or as torch brings them:

```bash
python -m blocktable_benchmarks.peers.consumers .peers
python tests/gpu/consumers.py triton cupy numba
```

Requests of random lengths are served in changing batches, with padded rows and tokens, PAD slots and blocks that a
window has let go of, by graphs captured once and replayed. Each output must equal dense attention within its dtype's
error, and each cache must be, bit for bit, what it was outside the slots of real tokens. What the kernels need of
memory that no token was written to is shown too:

| kernel | reads | the NULL block, and slots not written yet |
| --- | --- | --- |
| vLLM `reshape_and_cache_flash` (Triton) | slots | are not touched: it skips negative slots |
| vLLM `unified_attention` (Triton) | `triton_unified` | may hold anything: tests fill both with NaN |
| torch FlexAttention, whole cache | `flex_attention` | must be finite: what its mask hides is multiplied by 0 |

FlashInfer, FlashAttention 3 and torch's `varlen_attn` run where they are installed, and are said to be absent
elsewhere. Of FlashInfer these are the paged prefill and decode wrappers, planned from `export_host`, and
`append_paged_kv_cache`, fed by `token_requests`; its page table is also read and appended through in plain Python,
by its published definition. The recipes of [exports.md](exports.md) run there too, and it is shown that no call of a
step makes the host wait.

On an H200 the kernels of this table passed over the Triton, CuPy and Numba backends, in float16, bfloat16 and
float32; FlexAttention in a run of its own. So did FlashAttention 3 as vLLM 0.25.1 builds it, in the first two dtypes:
with NaN in the NULL block all of its tokens were finite. FlashInfer 0.5.3 passed in float16 and bfloat16, and no call
of a step waited; with NaN in the NULL block all tokens of its prefill were finite, and 19 of 1,548 of its decode's were
not: it needs a NULL block of finite values. `varlen_attn` of torch 2.11 takes no block table.
"""

VLLM = """\
## Widths in vLLM

vLLM rounds every table up for kernels that read 128 tokens together (`vllm_table` above). Version 0.33 rounds columns
to a multiple of `128 // gcd(128, block size)`, which is `plan_width`'s rule. Version 0.25.1 rounds *allocation* blocks
to a multiple of `128 // block size`, before they are split into kernel blocks. Both agree where the allocation block is
a power of two. Elsewhere 0.25.1 misses. With kernel blocks of 16 tokens a width must be a multiple of 8 columns:

"""


def vllm_0_25_1_width(num_blocks: int, block_size: int, kernel_block_size: int) -> int:
    """Return the columns of vLLM 0.25.1's tables, by its rule: blocks are rounded, then split."""
    if block_size <= 128:
        step = 128 // block_size
        num_blocks = -(-num_blocks // step) * step
    return num_blocks * (block_size // kernel_block_size)


def vllm_widths() -> str:
    """Return the cases in which vLLM 0.25.1's width is not a multiple of 128 tokens, beside the right one."""
    lines = [
        "| allocation block | kernel block | blocks in a row | 0.25.1's columns | tokens | least right width |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for block_size in (48, 80, 144):
        for num_blocks in (1, 3, 5):
            width = vllm_0_25_1_width(num_blocks, block_size, 16)
            right = -(-num_blocks * (block_size // 16) // 8) * 8
            mark = "" if width % 8 == 0 else " (no multiple of 128)"
            lines.append(f"| {block_size} | 16 | {num_blocks} | {width} | {width * 16}{mark} | {right} |")
    return "\n".join(lines)


def row(layout: Layout) -> str:
    """Return one line of the table."""
    cells = (
        f"`{layout.name}`",
        layout.consumer + (f"; {layout.note}" if layout.note else ""),
        layout.kind,
        f"`[{', '.join(layout.shape)}]` {layout.dtype}",
        layout.block_rule,
        layout.width_rule,
        layout.contiguity,
        "filler" if layout.null is None else str(layout.null),
        layout.source,
    )
    return f"| {' | '.join(cells)} |"


def page() -> str:
    """Return the page."""
    parts = [
        HEAD,
        "| name | who reads it | kind | array of a group | block size | width | contiguity | null | read in |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        *map(row, LAYOUTS.values()),
        "\n## The kinds\n",
        "| kind | what it holds | |",
        "| --- | --- | --- |",
        *(f"| {kind} | {text} | {KIND_NOTES[kind]} |" for kind, (_, text) in KINDS.items()),
        KERNELS,
        VLLM + vllm_widths(),
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    sys.stdout.write(f"{PAGE} is up to date.\n")
