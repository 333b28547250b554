"""Reading traces: the three formats, compressed files, and every way in which a file can be wrong."""

import gzip
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest

from blocktable_replay.files import ZSTD
from blocktable_replay.prefix import PrefixIndex
from blocktable_replay.readers import read_trace
from blocktable_replay.traces import Trace, TraceError

File: TypeAlias = Callable[..., Path]
"""Writes content, text or bytes, and under a name, if that matters; returns the path."""

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:17:03.9799600,4808,10\r\n"
    "2023-11-16 18:17:04.0319600,3180,8\r\n"
    "2023-11-16 18:17:04.0319601,110,0"
)
BURSTGPT = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n"
    '45.5,GPT-4,1087,0,1087,"Conversation, log"\n'
)
MOONCAKE = (
    '{"timestamp": 0, "input_length": 1100, "output_length": 500, "hash_ids": [0, 1, 2]}\n'
    '{"timestamp": 27, "input_length": 1024, "output_length": 4, "hash_ids": [0, 1]}\n'
)


@pytest.fixture
def file(tmp_path: Path) -> File:
    def write(content: str | bytes, name: str = "trace") -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


def lengths(trace: Trace) -> list[tuple[int, int]]:
    return list(zip(trace.input_lengths.tolist(), trace.output_lengths.tolist(), strict=True))


def test_azure_with_seven_digits_and_crlf(file: File) -> None:
    trace = read_trace(file(AZURE))
    assert trace.format == "Azure CSV"
    assert lengths(trace) == [(4808, 10), (3180, 8), (110, 0)]
    assert trace.arrivals == pytest.approx([0.0, 52.0, 52.0001], abs=0.001)
    assert trace.lines.tolist() == [2, 3, 4]
    assert trace.hash_ids is None


@pytest.mark.parametrize(
    "stamp", ["2024-05-10 00:00:00.009930+00:00", "2024-05-10 02:00:00.009930+02:00", "2024-05-10 00:00:00Z"]
)
def test_azure_with_a_zone(file: File, stamp: str) -> None:
    text = f"TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00,1,1\n{stamp},2,2\n"
    trace = read_trace(file(text))
    assert trace.arrivals[1] == pytest.approx(0.0 if stamp.endswith("Z") else 9.93, abs=0.001)


def test_burstgpt(file: File) -> None:
    trace = read_trace(file(BURSTGPT))
    assert trace.format == "BurstGPT CSV"
    assert lengths(trace) == [(472, 18), (1087, 0)]
    assert trace.arrivals.tolist() == [0.0, 40500.0]
    assert trace.notes == ()


def test_mooncake(file: File) -> None:
    trace = read_trace(file(MOONCAKE))
    assert trace.format == "Mooncake JSONL"
    assert lengths(trace) == [(1100, 500), (1024, 4)]
    assert trace.hash_ids is not None
    assert [ids.tolist() for ids in trace.hash_ids] == [[0, 1, 2], [0, 1]]


def test_arrivals_are_sorted_and_equal_ones_keep_their_order(file: File) -> None:
    trace = read_trace(file("Timestamp,Request tokens,Response tokens\n9,1,1\n3,2,1\n9,3,1\n3,4,1\n"))
    assert trace.input_lengths.tolist() == [2, 4, 1, 3]
    assert trace.lines.tolist() == [3, 5, 2, 4]


def test_unknown_columns_are_named(file: File) -> None:
    trace = read_trace(file("Timestamp,Colour,Request tokens,Response tokens\n1,red,2,3\n"))
    assert lengths(trace) == [(2, 3)]
    assert "nothing reads the columns 'Colour'" in trace.notes[0]
    assert ":1:" in trace.notes[0]
    fields = read_trace(file(MOONCAKE.replace('"timestamp"', '"user": 3, "timestamp"')))
    assert len(fields.notes) == 1
    assert "'user'" in fields.notes[0]


@pytest.mark.parametrize("name", ["plain.gz", "trace.zst", "no-ending"])
def test_compressed_files_are_known_by_their_bytes(file: File, name: str) -> None:
    assert lengths(read_trace(file(gzip.compress(MOONCAKE.encode()), name))) == [(1100, 500), (1024, 4)]


def test_zstd(file: File) -> None:
    zstd = pytest.importorskip(ZSTD)
    packed = zstd.compress(MOONCAKE.encode())
    assert lengths(read_trace(file(packed))) == [(1100, 500), (1024, 4)]
    half = len(MOONCAKE) // 2
    two_frames = b"".join(zstd.compress(part.encode()) for part in (MOONCAKE[:half], MOONCAKE[half:]))
    assert lengths(read_trace(file(two_frames))) == [(1100, 500), (1024, 4)]
    for cut in (len(packed) - 1, len(packed) // 2, 6):
        with pytest.raises(TraceError, match="torn or damaged"):
            read_trace(file(packed[:cut]))


def test_zstd_without_its_library(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, ZSTD, None)
    with pytest.raises(TraceError, match=r'pip install "blocktable\[report\]"'):
        read_trace(file(b"\x28\xb5\x2f\xfd" + bytes(20)))


def test_torn_gzip(file: File) -> None:
    packed = gzip.compress(AZURE.encode())
    with pytest.raises(TraceError, match="torn or damaged"):
        read_trace(file(packed[:-12]))
    with pytest.raises(TraceError, match="torn or damaged"):
        read_trace(file(packed[:20] + b"\0\0\0\0\0\0\0" + packed[27:]))


WRONG = {
    "empty": ("", "the file is empty"),
    "blank lines": ("\n\r\n\n", "the file is empty"),
    "only a header": ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no request"),
    "unknown columns": ("a,b,c\n1,2,3\n", ":1: 'a,b,c' begins no known trace"),
    "a column is missing": ("TIMESTAMP,ContextTokens\n", ":1: .* begins no known trace"),
    "too few columns": (AZURE + "\n2023-11-16 18:17:05\n", ":5: .* has 1 columns, the header names 3"),
    "negative": (AZURE.replace("3180", "-3180"), ":3: ContextTokens '-3180' is not from 1"),
    "no tokens": (AZURE.replace("3180", "0"), ":3: ContextTokens '0' is not from 1"),
    "a fraction": (AZURE.replace("3180", "3180.5"), ":3: ContextTokens '3180.5' is not a whole number"),
    "huge": (AZURE.replace("3180", "9" * 400), ":3: ContextTokens .* is not a whole number"),
    "no time": (AZURE.replace("18:17:04.0319600", "noon"), ":3: TIMESTAMP .* is not a time"),
    "a fraction of letters": (AZURE.replace("04.0319600", "04.03x"), ":3: TIMESTAMP .* is not a time"),
    "burst: no time": (BURSTGPT.replace("45.5", "nan"), ":3: Timestamp 'nan' is not a time"),
    "burst: negative time": (BURSTGPT.replace("45.5", "-1"), ":3: Timestamp '-1' is not a time"),
    "torn json": (MOONCAKE[:-20], ":2: .* is no JSON"),
    "a list": (MOONCAKE + "[1, 2]\n", ":3: .* is no JSON object"),
    "no hashes": (MOONCAKE.replace('"hash_ids": [0, 1]', '"more": 1'), ":2: the object lacks hash_ids"),
    "hashes are text": (MOONCAKE.replace("[0, 1]", '["0", "1"]'), ":2: hash_ids must be a list of integers"),
    "too many hashes": (MOONCAKE.replace("[0, 1]", "[0, 1, 2]"), ":2: hash_ids has 3 entries"),
    "a boolean": (MOONCAKE.replace("1024", "true"), ":2: input_length 'True' is not a whole number"),
    "infinite": (MOONCAKE.replace("27", "Infinity"), ":2: timestamp 'inf' is not a time"),
    "no text": (b"TIMESTAMP,ContextTokens,GeneratedTokens\n\xff\xfe\n", "no UTF-8 text"),
}


@pytest.mark.parametrize(("content", "sentence"), WRONG.values(), ids=WRONG)
def test_a_wrong_file_is_said_with_its_line(file: File, content: str | bytes, sentence: str) -> None:
    path = file(content)
    with pytest.raises(TraceError, match=sentence) as caught:
        read_trace(path)
    assert str(caught.value).startswith(str(path))
    assert str(caught.value).endswith(".")


def test_no_file_and_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(TraceError, match="cannot be read"):
            read_trace(path)


def test_bad_lines_are_counted(file: File) -> None:
    trace = read_trace(file(AZURE.replace("3180", "-1")), on_bad_line="skip")
    assert trace.lines.tolist() == [2, 4]
    assert [bad.line for bad in trace.bad_lines] == [3]
    with pytest.raises(TraceError, match=r"holds no request \(1 bad lines, the first is line 2"):
        read_trace(file("TIMESTAMP,ContextTokens,GeneratedTokens\nx,y,z\n"), on_bad_line="skip")


def test_parts_of_a_trace(file: File) -> None:
    lines = "".join(f"{second},{second + 1},1\n" for second in range(100))
    trace = read_trace(file("Timestamp,Request tokens,Response tokens\n" + lines))
    assert trace.between(10, 20, None).input_lengths.tolist() == list(range(11, 21))
    assert trace.between(None, 5, 3).input_lengths.tolist() == [1, 2, 3]
    assert trace.between(98, None, 9).input_lengths.tolist() == [99, 100]
    assert len(trace.between(200, None, None)) == 0


def test_fuzz_no_broken_file_ends_in_a_traceback(file: File) -> None:
    """2,000 broken files: each is read, or refused in a sentence."""
    chance = random.Random(7)
    originals = [text.encode() for text in (AZURE, BURSTGPT, MOONCAKE)]
    originals += [gzip.compress(original) for original in originals]
    said: list[str] = []
    for _ in range(2000):
        content = bytearray(chance.choice(originals))
        for _ in range(chance.randint(1, 6)):
            break_somewhere(chance, content)
        path = file(bytes(content))
        for on_bad_line in ("stop", "skip"):
            try:
                trace = read_trace(path, on_bad_line=on_bad_line)
            except TraceError as error:
                said.append(str(error))
            else:
                assert len(trace) > 0
                assert trace.input_lengths.min() >= 1
                assert np.isfinite(trace.arrivals).all()
    assert all(sentence.endswith(".") for sentence in said)
    assert 1000 < len(said) < 4000  # the files are broken, and some lines of some survive


def break_somewhere(chance: random.Random, content: bytearray) -> None:
    place = chance.randrange(len(content) + 1)
    what = chance.randrange(5)
    if what == 0:
        content[place:] = b""
        content += b"x" if not content else b""
    elif what == 1:
        content[place : place + chance.randint(1, 9)] = b""
        content += b"," if not content else b""
    elif what == 2:
        content[place:place] = bytes(chance.randrange(256) for _ in range(chance.randint(1, 9)))
    elif what == 3:
        content[place:place] = chance.choice((b"-", b"\n", b'"', b",", b"{", b"]", b"1e999", b"null", b"\0", b"9" * 30))
    else:
        start = chance.randrange(len(content) + 1)
        content[place:place] = content[start : start + 40]


def test_prefix_keys_are_equal_where_all_tokens_before_are() -> None:
    hash_ids = ([1, 2, 3], [1, 2, 4], [9, 2, 3], [1, 2])
    trace = Trace(
        source="",
        format="",
        arrivals=np.zeros(4),
        input_lengths=np.array([1536, 1536, 1536, 1000]),  # the last one's second hash is partial
        output_lengths=np.ones(4, np.int64),
        lines=np.arange(4),
        hash_ids=tuple(np.array(ids) for ids in hash_ids),
    )
    index = PrefixIndex(trace)
    for tokens_per_block in (16, 48, 512, 768, 1024):
        keys = [index.keys(request, tokens_per_block) for request in range(4)]
        assert [group.size for group in keys] == [1536 // tokens_per_block] * 3 + [512 // tokens_per_block]
        shared = 1024 // tokens_per_block
        assert (keys[0][:shared] == keys[1][:shared]).all()
        assert not set(keys[0][shared:].tolist()) & set(keys[1].tolist())
        assert not set(keys[0].tolist()) & set(keys[2].tolist())  # one hash in common, but not what comes before it
        assert (keys[3] == keys[0][: keys[3].size]).all()
        assert max(group.max(initial=-1) for group in keys) < index.num_keys(tokens_per_block)
        for group in keys:
            assert np.unique(group).size == group.size


def test_a_file_of_blank_lines_ends_early(tmp_path: Path) -> None:
    """A kilobyte of zstd, or some of gzip, holds 30 million lines."""
    path = tmp_path / "trace"
    path.write_bytes(gzip.compress(b"\n" * (1 << 25), 1))
    begin = time.perf_counter()
    with pytest.raises(TraceError, match="more than 262144 lines are blank"):
        read_trace(path)
    assert time.perf_counter() - begin < 5
