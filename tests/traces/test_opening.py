"""What a file is, by its content whatever its name: every kind is read or refused with one line that says what to give."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import zipfile

import pytest
from damage import flipped, outcome
from k3lab.cli.main import run
from k3lab.traces import TraceError, read_trace
from k3lab.traces.readers import packed
from k3lab.traces.readers.opening import read_ncu

HEAD = {"deviceProperties": [{"id": 0, "name": "NVIDIA GB300"}]}
NCU = '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n"0","k","gpu__time_duration.sum","ns","5"\n'


def archive(path, members, mode="w:gz"):
    with tarfile.open(path, mode) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


@pytest.fixture
def kinds(tmp_path, make):
    """One file of every kind that needs no tool, each of the same run that passes."""
    events = make.pdl_events(slow=None)
    return {
        "torch": make.torch(tmp_path / "a.json", events, **HEAD),
        "table": make.gpu_trace(tmp_path / "a.csv", events),
        "sqlite": make.node_mode(tmp_path / "a.sqlite", replays=7).write(),
    }


@pytest.mark.parametrize("kind", ["torch", "table", "sqlite"])
def test_by_content_under_any_name_and_packed(tmp_path, kinds, kind):
    data, wanted = kinds[kind].read_bytes(), read_trace(kinds[kind])
    (tmp_path / "other").mkdir()
    for name in ("x.sqlite", "x.json", "x.csv", "x.txt", "x.nsys-rep", "x.ncu-rep", "x"):
        for content in (data, gzip.compress(data)):
            path = tmp_path / "other" / name
            path.write_bytes(content)
            found = read_trace(path)
            assert (found.kernels, found.format, found.path) == (wanted.kernels, wanted.format, name)
    assert sorted(item.name for item in (tmp_path / "other").iterdir()) == sorted(
        ["x.sqlite", "x.json", "x.csv", "x.txt", "x.nsys-rep", "x.ncu-rep", "x"]
    )


@pytest.mark.parametrize("kind", ["torch", "table", "sqlite"])
def test_one_trace_in_an_archive(tmp_path, kinds, kind):
    data, wanted = kinds[kind].read_bytes(), read_trace(kinds[kind])
    name = kinds[kind].name
    for members, mode in (
        ([(name, data)], "w:gz"),
        ([(name, data)], "w"),
        ([("a/._" + name, b"mac"), ("../../etc/" + name, data)], "w:gz"),
        ([(name + ".gz", gzip.compress(data))], "w:gz") if kind != "sqlite" else ([(name, data)], "w"),
    ):
        found = read_trace(archive(tmp_path / "t.json.tgz", members, mode))
        assert (found.kernels, found.path) == (wanted.kernels, "t.json.tgz")


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ([("a.json", b"[]"), ("b.json", b"[]")], "several files in one archive"),
        ([("._a.json", b"mac")], "no file in it"),
        ([("a.json", b"")], "the file is empty"),
        ([("a.json", b"hello")], "a.json: not a trace"),
        ([("a.json", b"{}")], "a.json: JSON, but not a profiler trace"),
    ],
)
def test_archives_that_hold_no_single_trace(tmp_path, members, says):
    with pytest.raises(TraceError, match=says) as caught:
        read_trace(archive(tmp_path / "t.tgz", members))
    assert "\n" not in str(caught.value)


def test_an_archive_in_an_archive_and_a_damaged_one(tmp_path, kinds):
    inner = archive(tmp_path / "inner.tar", [("a.json", kinds["torch"].read_bytes())], "w")
    with pytest.raises(TraceError, match="an archive inside an archive"):
        read_trace(archive(tmp_path / "t.tgz", [("inner.tar", inner.read_bytes())]))
    data = archive(tmp_path / "t.tgz", [("a.json", kinds["torch"].read_bytes())]).read_bytes()
    for size in (30, len(data) // 2, len(data) - 4):
        (tmp_path / "t.tgz").write_bytes(data[:size])
        assert outcome(tmp_path / "t.tgz") == "refused"
    plain = inner.read_bytes()
    for size in (300, 700, len(plain) // 2):
        inner.write_bytes(plain[:size])
        assert outcome(inner) == "refused"


def test_what_unpacks_to_too_much_is_refused(tmp_path, kinds, monkeypatch):
    monkeypatch.setattr(packed, "MAX_BYTES", 1000)
    path = tmp_path / "t.csv.gz"
    path.write_bytes(gzip.compress(kinds["table"].read_bytes()))
    with pytest.raises(TraceError, match="unpacks to over"):
        read_trace(path)
    with pytest.raises(TraceError, match="unpacks to over"):
        read_trace(archive(tmp_path / "t.tar", [("a.sqlite", kinds["sqlite"].read_bytes())], "w"))


def test_temporary_copies_are_deleted(tmp_path, kinds, monkeypatch):
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    (tmp_path / "t.gz").write_bytes(gzip.compress(kinds["sqlite"].read_bytes()))
    read_trace(tmp_path / "t.gz")
    (tmp_path / "t.gz").write_bytes(gzip.compress(kinds["sqlite"].read_bytes()[:5000]))
    assert outcome(tmp_path / "t.gz") == "refused"
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"PAR1" + bytes(100), "one Parquet table; give the folder of nsys export --type parquetdir"),
        (b"ARROW1\x00\x00" + bytes(100), "Arrow export of nsys.*sqlite or parquetdir"),
        (b"\x89HDF\r\n\x1a\n" + bytes(100), "HDF export of nsys.*sqlite or parquetdir"),
        (b'{"EXPORT_SCHEMA_VERSION": "3.25", "StringIds": []}', "JSON export of nsys.*sqlite or parquetdir"),
        (b'{"Type": 1, "Id": 2}\n{"Type": 1, "Id": 3}\n', "jsonlines.*sqlite or parquetdir"),
        (b'[{"Start (ns)": 1, "Duration (ns)": 2}]', "nsys stats as JSON; make it with --format csv"),
        (b"<!DOCTYPE html><html>", "a web page"),
        (b"PK\x03\x04" + bytes(40), "a zip archive"),
        (b"\xff\xfe" + '{"traceEvents": []}'.encode("utf-16-le"), "JSON in UTF-16; save it as UTF-8"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "git lfs pull"),
        (
            b"Processing [x.sqlite] with [y.py]...\nSKIPPED: x.sqlite does not contain CUDA kernel data.\n",
            "no kernels were traced",
        ),
        (b"just words, some of them\nand more, of them\n", "not a trace"),
        (b"SQLite format", "not a trace"),
        (bytes(5000), "not a trace"),
        (b"\xef\xbb\xbf", "not a trace"),
        (b" \n\t\n", "not a trace"),
        (b"", "the file is empty"),
        (gzip.compress(b"", mtime=0), "the file is empty"),
        (gzip.compress(b"words", mtime=0), "not a trace"),
        (b"\x1f\x8b" + bytes(50), "damaged gzip file"),
    ],
)
def test_what_is_refused_and_why(tmp_path, capsys, data, says):
    for name in ("t.json", "t.bin"):
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(TraceError, match=says) as caught:
            read_trace(path)
        assert "\n" not in str(caught.value) and str(caught.value).startswith(name)
    assert run(["trace", "check", str(path)]) == 2
    assert run(["trace", "kernels", str(path)]) == 2
    assert run(["trace", "calls", str(path), "--steps", "1", "--layers", "1"]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_folders(tmp_path):
    with pytest.raises(TraceError, match="a folder without Parquet tables"):
        read_trace(tmp_path)
    (tmp_path / "StringIds.arrow").write_bytes(b"ARROW1")
    with pytest.raises(TraceError, match="Arrow export of nsys"):
        read_trace(tmp_path)


def test_a_zip_is_named_and_a_torch_trace_that_mentions_other_tools_is_read(tmp_path, make):
    with zipfile.ZipFile(tmp_path / "t.zip", "w") as out:
        out.writestr("a.json", "[]")
    with pytest.raises(TraceError, match="unpack it"):
        read_trace(tmp_path / "t.zip")
    events = [make.kernel('"Start (ns)" "StringIds" Metric Name', 1, 2), *make.pdl_events(steps=1)]
    assert len(read_trace(make.torch(tmp_path / "t.json", events)).kernels) == 53
    rows = "".join(json.dumps(event) + ",\n" for event in events).rstrip(",\n")
    (tmp_path / "bare.json").write_text(f"[{rows}]")
    assert len(read_trace(tmp_path / "bare.json").kernels) == 53


@pytest.mark.parametrize("kind", ["table", "packed table", "ncu", "sums"])
def test_flipped_bytes(tmp_path, make, kind):
    path = tmp_path / "t.csv"
    make.gpu_trace(path, make.pdl_events())
    data = path.read_bytes()
    if kind == "packed table":
        data = gzip.compress(data)
    elif kind == "ncu":
        data = NCU.encode() * 20
    elif kind == "sums":
        data = b"Time (%),Total Time (ns),Instances,Avg (ns),Name\n" + b'50.0,100,4,25.0,"a, b"\n' * 50
    seen = set()
    for broken in flipped(data, 13, 150):
        path.write_bytes(broken)
        seen.add(outcome(path))
        if kind == "ncu":
            seen.add(outcome(path, read_ncu))
    assert not seen & {"pass", "several lines"}
    assert "refused" in seen or kind == "table"
