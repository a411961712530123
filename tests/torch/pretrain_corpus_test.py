"""examples/pretrain's corpus command: what it takes and leaves out, shards, tokenizer, resuming."""

import hashlib
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from checks import refused

EXAMPLE = Path(__file__).parents[2] / "examples" / "pretrain"
sys.path.append(str(EXAMPLE))

import corpus  # noqa: E402
from data import Corpus, verify  # noqa: E402

TEXTS = {
    "a": b"one",
    "b": b"two words",
    "c": b"one",
    "d": b"two\n  words\n",  # the same but for white space
    "empty": b" \n",
    "large": b"x" * 100,
    "latin": b"caf\xe9",
}


def documents(count):
    """Some hundred bytes of words each, no two alike."""
    words = Path(__file__).read_text().split()
    for i in range(count):
        yield f"{i}", f"number {i} {' '.join(words[i : i + 60])} ".encode()


def shards(folder, part):
    files = sorted(folder.glob(f"{part}-*.bin"))
    return [np.fromfile(file, "<u2") for file in files]


def test_a_corpus_has_each_document_once(tmp_path):
    manifest = corpus.build(tmp_path, TEXTS.items(), validation=0.0, largest=50)
    assert manifest["train"]["documents"] == 2 and manifest["validation"]["documents"] == 0
    expected = {"same": 2, "empty": 1, "too large": 1, "not UTF-8": 1, "past the limit": 0}
    assert manifest["left out"] == expected
    tokens = shards(tmp_path, "train")[0].tolist()
    ends = [i for i, token in enumerate(tokens) if token == 256]
    pieces = {bytes(tokens[: ends[0]]), bytes(tokens[ends[0] + 1 : ends[1]])}
    assert pieces == {b"one", b"two words"} and ends[1] == len(tokens) - 1
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "manifest.json", "settings.json", "train-00000.bin"
    ]  # fmt: skip


def test_parts_have_no_document_in_common_and_adding_files_moves_none(tmp_path):
    few = corpus.build(tmp_path / "few", documents(40), validation=0.3)
    many = corpus.build(tmp_path / "many", documents(80), validation=0.3)
    for manifest in (few, many):
        assert manifest["train"]["documents"] > 10 and manifest["validation"]["documents"] > 3
    texts = {}
    for name in ("few", "many"):
        for part in corpus.PARTS:
            tokens = np.concatenate(shards(tmp_path / name, part))
            text = "".join(chr(t) if t < 256 else "\0" for t in tokens)
            texts[name, part] = set(text.split("\0")[:-1])
    for part in corpus.PARTS:
        assert texts["few", part] < texts["many", part]
    assert not texts["many", "train"] & texts["many", "validation"]


def test_a_tokenizer_of_its_own_gives_the_text_back(tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    texts = dict(documents(60)) | {"end": f"a text with {corpus.END} inside".encode()}
    manifest = corpus.build(tmp_path, texts.items(), vocabulary=400, validation=0.1)
    assert manifest["vocabulary"] == 400
    tokens = np.concatenate(shards(tmp_path, "train") + shards(tmp_path, "validation"))
    assert len(tokens) < 0.6 * sum(map(len, texts.values()))  # a byte a token would be 1
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ends = np.flatnonzero(tokens == manifest["end"])
    pieces = np.split(tokens, ends + 1)[:-1]
    assert {tokenizer.decode(p[:-1].tolist()).encode() for p in pieces} == set(texts.values())


def test_hashes_and_counts_are_those_of_the_files(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "SHARD", 2000)
    manifest = corpus.build(tmp_path, documents(60), validation=0.2)
    for part in corpus.PARTS:
        listed = manifest[part]["shards"]
        assert len(listed) > 1
        for shard in listed:
            data = (tmp_path / shard["file"]).read_bytes()
            assert hashlib.sha256(data).hexdigest() == shard["sha256"]
            assert len(data) == 2 * shard["tokens"]
        assert manifest[part]["tokens"] == sum(shard["tokens"] for shard in listed)
    several = Corpus(tmp_path, "train", 64)
    counts = [(shard["tokens"] - 1) // 64 for shard in manifest["train"]["shards"]]
    assert several.windows == sum(counts)
    rows = [several.tokens(window).tolist() for window in range(several.windows)]
    expected = [
        tokens[64 * i : 64 * i + 65].tolist()
        for tokens, count in zip(shards(tmp_path, "train"), counts)
        for i in range(count)
    ]
    assert rows == expected


def test_a_stopped_command_continues(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "SHARD", 2000)
    whole = corpus.build(tmp_path / "whole", documents(60), validation=0.2)
    written, write = [], corpus.write

    def stopped(path, data):
        if path.name == "train-00003.bin":
            path.with_name(path.name + ".partial").write_bytes(b"half")
            raise KeyboardInterrupt
        write(path, data)

    monkeypatch.setattr(corpus, "write", stopped)
    with pytest.raises(KeyboardInterrupt):
        corpus.build(tmp_path / "parts", documents(60), validation=0.2)
    assert not (tmp_path / "parts" / "manifest.json").exists()
    monkeypatch.setattr(
        corpus, "write", lambda path, data: (written.append(path), write(path, data))
    )
    nothing = iter(())  # the text exists: no source is read again
    assert corpus.build(tmp_path / "parts", nothing, validation=0.2) == whole
    assert "train-00002.bin" not in {path.name for path in written}
    refused(ValueError, "has a corpus with", corpus.build, tmp_path / "parts", nothing, validation=0.3)


def test_a_limit_takes_documents_whatever_their_order(tmp_path):
    every = list(documents(60))
    a = corpus.build(tmp_path / "a", every, validation=0.2, limit=8000)
    b = corpus.build(tmp_path / "b", reversed(every), validation=0.2, limit=8000)
    assert a == b and a["left out"]["past the limit"] > 0
    assert sum(a[part]["bytes"] for part in corpus.PARTS) <= 8000
    counts = [a[part]["documents"] for part in corpus.PARTS]
    assert 0.05 < counts[1] / sum(counts) < 0.4  # the parts do not depend on the limit


def older(path):
    """The file as an earlier version wrote it: "held_out" is now "validation"."""
    written = path.read_text()
    assert '"validation"' in written
    path.write_text(written.replace("validation", "held_out"))


def test_a_folder_begun_by_an_earlier_version_is_finished(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "SHARD", 2000)
    whole = corpus.build(tmp_path / "whole", documents(60), validation=0.2)
    folder, write = tmp_path / "parts", corpus.write

    def stopped(path, data):
        if path.name == "validation-00001.bin":
            raise KeyboardInterrupt
        write(path, data)

    monkeypatch.setattr(corpus, "write", stopped)
    with pytest.raises(KeyboardInterrupt):
        corpus.build(folder, documents(60), validation=0.2)
    older(folder / "settings.json")
    os.rename(folder / "validation-00000.bin", folder / "held_out-00000.bin")
    written = []
    monkeypatch.setattr(
        corpus, "write", lambda path, data: (written.append(path.name), write(path, data))
    )
    refused(ValueError, "has a corpus with", corpus.build, folder, iter(()), validation=0.3)
    assert corpus.build(folder, iter(()), validation=0.2) == whole
    assert "validation-00000.bin" not in written and "validation-00001.bin" in written
    assert not list(folder.glob("held_out*"))


def test_a_corpus_of_an_earlier_version_is_read(tmp_path):
    corpus.build(tmp_path, documents(60), validation=0.3)
    read = lambda: [Corpus(tmp_path, part, 32).tokens(1).tolist() for part in corpus.PARTS]
    before = read()
    for path in tmp_path.glob("validation-*.bin"):
        os.rename(path, tmp_path / path.name.replace("validation", "held_out"))
    older(tmp_path / "manifest.json")
    verify(tmp_path)
    assert read() == before


def test_the_older_option_of_the_validation_part_warns(tmp_path):
    texts = [tmp_path / f"{name}.txt" for name, _ in documents(40)]
    for path, (_, content) in zip(texts, documents(40)):
        path.write_bytes(content)
    now = command(tmp_path / "now", *texts, "--bytes", "--validation", "0.3")
    then = command(tmp_path / "then", *texts, "--bytes", "--held-out", "0.3")
    assert now.returncode == 0 and "warning" not in now.stderr, now.stderr
    assert then.returncode == 0 and then.stdout == now.stdout
    assert then.stderr.count("warning: --held-out is the older name of --validation\n") == 1
    both = command(tmp_path / "both", *texts, "--validation", "0.3", "--held-out", "0.2")
    assert both.returncode == 2 and "not allowed with argument --validation" in both.stderr
    listed = command("--help").stdout
    assert "--validation" in listed and "--held-out" not in listed


def command(*arguments, path=None):
    environment = os.environ | ({"PATH": path} if path is not None else {})
    return subprocess.run(
        [sys.executable, EXAMPLE / "corpus.py", *map(str, arguments)],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip


def archive(folder, scratch):
    """A linux-source-1.0 package, with the archive that Debian's has."""
    tree = scratch / "linux-1.0" / "kernel"
    tree.mkdir(parents=True)
    for name, content in documents(40):
        (tree / f"{name}.c").write_bytes(content)
    (tree / "object.o").write_bytes(b"no text")
    target = scratch / "package" / "usr" / "src"
    target.mkdir(parents=True)
    control = scratch / "package" / "DEBIAN" / "control"
    control.parent.mkdir()
    control.write_text(
        "Package: linux-source-1.0\nVersion: 1\nArchitecture: all\nMaintainer: n\nDescription: d\n"
    )
    with tarfile.open(target / "linux.tar.xz", "w:xz") as source:
        source.add(scratch / "linux-1.0", "linux-1.0")
    subprocess.run(
        ["dpkg-deb", "--build", "--root-owner-group", scratch / "package", folder / "linux.deb"],
        check=True, capture_output=True,
    )  # fmt: skip


def test_packages_are_fetched_and_read(tmp_path):
    archive(tmp_path, tmp_path / "scratch")
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, lines in {
        "apt-cache": 'echo "linux-source"; echo "  Depends: linux-source-1.0"',
        "apt-get": f'if [ "$2" = linux-source-1.0 ]; then cp {tmp_path}/linux.deb .; fi',
    }.items():
        (tools / name).write_text(f"#!/bin/sh\n{lines}\n")
        (tools / name).chmod(0o755)
    out = tmp_path / "out"
    packages = ("--bytes", "--validation", "0.2", "--packages", "linux-source")
    done = command(out, *packages, path=f"{tools}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    assert "fetching linux-source-1.0" in done.stderr
    manifest = json.loads((out / "manifest.json").read_text())
    assert sum(manifest[part]["documents"] for part in corpus.PARTS) == 40
    assert not (out / "text.bin").exists()


def test_what_is_wrong_is_said_in_a_sentence(tmp_path):
    (tmp_path / "a.txt").write_text("one document")
    for arguments, message in (
        ((tmp_path / "out",), "expected files, or --packages"),
        ((tmp_path / "out", tmp_path / "absent"), "no file or folder found at "),
        ((tmp_path / "out", tmp_path / "a.txt"), "too few documents for --validation 0.05"),
        ((tmp_path / "out2", tmp_path / "a.txt", "--vocabulary", "70000"), "--vocabulary must be in [257, 65536], got 70000"),
    ):
        done = command(*arguments)
        assert done.returncode != 0 and message in done.stderr, done.stderr
        assert "Traceback" not in done.stderr
    none = command(tmp_path / "out3", "--packages", "linux-source", path=str(tmp_path))
    assert none.returncode == 1 and "--packages requires apt-get" in none.stderr
