"""The demonstration's computation, and its list of files."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tenure
from tenure._demo import computation, job
from tenure._demo.computation import Count, TooDeep, count_chunk, count_file, differences, merge
from tenure._demo.job import Chunk, File, survey, with_poison_file
from tenure._demo.messages import BODY_MAX, Task


def write(folder: Path, **contents: str) -> Path:
    for name, content in contents.items():
        (folder / name).write_text(content)
    return folder


# --- one file ---


def test_a_file_is_counted(tmp_path: Path) -> None:
    write(tmp_path, poem="so much depends\nupon\n")
    count = count_file(str(tmp_path), "poem", parsed=False)
    assert (count.size, count.lines, count.words, count.nodes) == (21, 2, 4, 0)
    assert len(count.digest) == 64


@given(text=st.text(alphabet="ab \n\t", max_size=40), block=st.integers(1, 7))
def test_the_edges_of_blocks_cut_no_word(tmp_path_factory: pytest.TempPathFactory, text: str, block: int) -> None:
    folder = tmp_path_factory.mktemp("blocks")
    (folder / "file").write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(computation, "BLOCK", block)
        count = count_file(str(folder), "file", parsed=False)
    assert (count.words, count.lines) == (len(text.split()), text.count("\n"))


def test_a_syntax_tree_is_counted_if_there_is_one(tmp_path: Path) -> None:
    write(tmp_path, good="x = 1\n", bad="x = = 1\n", zero="x = 1\0", deep="[" * 300)
    counted = {name: count_file(str(tmp_path), name, parsed=True).nodes for name in ("good", "bad", "zero", "deep")}
    assert counted == {"good": 5, "bad": 0, "zero": 0, "deep": 0}


def test_a_failing_file_always_fails_its_whole_chunk(tmp_path: Path) -> None:
    write(tmp_path, **{f"{number}.py": "x = 1\n" for number in range(8)})
    job = survey(tmp_path, at_least=0.0)
    poisoned_job, chunk = with_poison_file(job, tmp_path / "poison.py")
    assert [one.number for one in poisoned_job.chunks] == list(range(1, len(job.chunks) + 2))
    assert poisoned_job.chunks[chunk.number - 1] == chunk
    assert {*poisoned_job.files} == {*job.files, *chunk.files}
    for _ in range(2):
        with pytest.raises(TooDeep, match=r"poison\.py nests brackets"):
            count_chunk(poisoned_job.folder, Chunk(1, (File("0.py", parsed=True), *chunk.files)))


def test_a_chunk_is_counted_file_by_file_and_takes_its_time(tmp_path: Path) -> None:
    write(tmp_path, a="one", b="two words")
    began = time.monotonic()
    counts = count_chunk(str(tmp_path), Chunk(1, (File("a", parsed=False), File("b", parsed=False))), pace=0.01)
    assert time.monotonic() - began >= 0.02
    assert [count.words for count in counts] == [1, 2]


def test_a_very_long_file_is_not_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(computation, "BLOCK", 4)
    monkeypatch.setattr(computation, "SYNTAX_MAX", 6)
    write(tmp_path, short="x = 1\n", long="x = 12\n")
    assert [count_file(str(tmp_path), name, parsed=True).nodes for name in ("short", "long")] == [5, 0]


def test_a_file_that_cannot_be_read_is_reported_and_not_fatal(tmp_path: Path) -> None:
    assert count_file(str(tmp_path), "missing", parsed=True) == Count("missing", error="No such file or directory")


# --- many files ---


def test_a_total_does_not_depend_on_the_order(tmp_path: Path) -> None:
    write(tmp_path, a="one", b="two words", c="three words here")
    counts = [count_file(str(tmp_path), name, parsed=False) for name in "abc"]
    total = merge(counts)
    assert (total.files, total.words, total.unreadable) == (3, 6, 0)
    assert merge(reversed(counts)) == total


def test_the_digest_stands_for_names_and_contents() -> None:
    digests = {
        merge([Count("a", digest="1"), Count("b", digest="2")]).digest,
        merge([Count("a", digest="2"), Count("b", digest="1")]).digest,
        merge([Count("a", digest="1"), Count("c", digest="2")]).digest,
        merge([Count("a", digest="1")]).digest,
    }
    assert len(digests) == 4


def test_differences_are_named() -> None:
    mine = [Count("a", words=1), Count("b", words=2), Count("only mine")]
    theirs = [Count("b", words=3), Count("a", words=1), Count("only theirs")]
    assert differences(mine, theirs) == ["b", "only mine", "only theirs"]
    assert differences(mine, list(reversed(mine))) == []


# --- which files ---


def test_a_survey_lists_all_finite_readable_files(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    write(tmp_path, b="", a="")
    write(tmp_path / "deep" / "er", **{"c.py": "pass"})
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    found = survey(tmp_path, at_least=0.0)
    assert [file.path for file in found.files] == ["a", "b", "dangling", "deep/er/c.py"]
    assert [file.path for file in found.files if file.parsed] == ["deep/er/c.py"]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no names that are not text")
def test_names_need_not_be_text(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9")).write_text("two words")
    (file,) = survey(tmp_path, at_least=0.0).files
    assert merge([count_file(str(tmp_path), file.path, parsed=False)]).words == 2


def test_the_default_is_the_standard_library_without_packages_that_were_added() -> None:
    found = survey(None, at_least=0.0)
    paths = [file.path for file in found.files]
    assert "asyncio/base_events.py" in paths
    assert all(path.endswith(".py") and "site-packages" not in path for path in paths)


def test_only_so_much_is_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "PARSED_MAX", 100)
    for number in range(10):
        write(tmp_path, **{f"{number}.py": "x = 1".ljust(30), f"{number}.txt": "no Python" * 100})
    found = survey(tmp_path, at_least=0.0)
    assert [file.path for file in found.files if file.parsed] == ["0.py", "3.py", "6.py", "9.py"]


def test_much_is_cut_into_chunks_of_about_the_same_work(tmp_path: Path) -> None:
    for number in range(500):
        write(tmp_path, **{f"{number:03}": "x" * 100})
    found = survey(tmp_path, at_least=0.0)
    sizes = {len(chunk.files) for chunk in found.chunks[:-1]}
    assert 60 <= len(found.chunks) <= job.CHUNKS
    assert max(sizes) - min(sizes) <= 1
    assert [file.path for file in found.files] == sorted(os.listdir(tmp_path))


def test_a_chunk_fits_into_a_message_of_any_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "CHUNKS", 1)
    for number in range(250):
        write(tmp_path, **{f"{number:03}" + "ü" * 60: ""})
    chunks = survey(tmp_path, at_least=0.0).chunks
    assert len(chunks) >= 3
    assert all(len(Task(str(tmp_path), chunk, 0.0).outgoing(named=True).body) <= BODY_MAX for chunk in chunks)
    assert all(len(chunk.files) <= job.FILES_MAX for chunk in chunks)


def test_little_work_is_paced_and_much_is_not(tmp_path: Path) -> None:
    write(tmp_path, a="little", b="little")
    assert survey(tmp_path, at_least=1.0).pace == pytest.approx(0.5, rel=0.01)
    assert survey(tmp_path, at_least=60.0).pace == job.PACE_MAX
    with (tmp_path / "much").open("wb") as file:
        file.truncate(10_000_000_000)
    assert survey(tmp_path, at_least=6.0).pace == 0.0


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(tenure.ConfigError, match="holds no files"):
        survey(tmp_path, at_least=0.0)
    with pytest.raises(tenure.ConfigError, match="is not a folder"):
        survey(tmp_path / "missing", at_least=0.0)
    with pytest.raises(tenure.ConfigError, match="is not a folder"):
        survey(write(tmp_path, file="") / "file", at_least=0.0)
