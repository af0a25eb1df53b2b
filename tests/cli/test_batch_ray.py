"""`dflash batch --ray`: the same records from workers that Ray runs. Needs the extra `ray`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.dflash_command import dflash
from tests.cli.killed_batch import records, told, write_lines

pytestmark = pytest.mark.ray
SMALL = ("--max-ctx", "512", "--threads", "1")


@pytest.mark.parametrize("order", ["--ordered", "--unordered"])
def test_two_workers_make_the_records_that_one_process_makes(tmp_path: Path, order: str) -> None:
    source, here, there = tmp_path / "in.jsonl", tmp_path / "here.jsonl", tmp_path / "there.jsonl"
    bad = write_lines(source, 100, seed=1)
    assert dflash("batch", str(source), "-o", str(here), *SMALL).code == 5
    args = ("batch", str(source), "-o", str(there), *SMALL, "--slots", "2", "--ray", "local")
    done = dflash(*args, "--ray-workers", "2", order)
    assert (done.code, done.out) == (5, ""), done.err
    assert f"each of 100 lines has its record in {there}; {len(bad)} failed" in done.err
    found = records(there)
    if order == "--unordered":
        found.sort(key=lambda record: int(record["id"].split("_")[2]))
    assert [told(record) for record in found] == [told(record) for record in records(here)]


def test_a_batch_begun_here_goes_on_there(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"prompt": f"{i} foxes", "max_tokens": 2}) + "\n" for i in range(9)))
    assert dflash("batch", str(source), "-o", str(target), *SMALL).code == 0
    whole = target.read_bytes().splitlines(keepends=True)
    target.write_bytes(b"".join(whole[:4]) + whole[4][:50])
    done = dflash("batch", str(source), "-o", str(target), *SMALL, "--resume", "--ray", "local")
    assert done.code == 0, done.err
    assert target.read_bytes().splitlines(keepends=True)[:4] == whole[:4]
    assert [told(record) for record in records(target)] == [told(json.loads(line)) for line in whole]


def test_what_a_worker_cannot_open_is_told_as_it_is_here(tmp_path: Path) -> None:
    source, junk = tmp_path / "in.jsonl", tmp_path / "junk.gguf"
    source.write_text('{"prompt": "a"}\n')
    junk.write_bytes(b"GGUFjunk")
    done = dflash("batch", str(source), str(junk), "-o", str(tmp_path / "out"), "--ray", "local")
    assert (done.code, done.out) == (3, "")
    assert done.err.splitlines()[-1].startswith(f"dflash: error: {junk} has 8 bytes")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "127.0.0.1:99999"])
def test_a_cluster_that_is_not_there_is_told_at_once(tmp_path: Path, address: str) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n')
    target.write_text("kept")
    done = dflash("batch", str(source), "-o", str(target), "--overwrite", "--ray", address)
    assert (done.code, done.out, target.read_text()) == (1, "", "kept")
    assert f"dflash: error: no cluster of Ray answers at {address}: " in done.err
