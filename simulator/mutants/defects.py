"""The defects: calls that order memory accesses, dropped, and those of changes.py."""

import collections
import dataclasses
import fnmatch
import pathlib
import re
import shutil
import sys

from changes import CHANGES

ROOT = pathlib.Path(__file__).resolve().parents[2]
CUDA = pathlib.Path("src") / "cuda"
# Not ptx: the simulator has its own.
FOLDERS = ["core", "epilogue", "load", "rowwise", "schedule", "sm80", "sm90", "sm100", "step"]

# What orders accesses of memory, by the name that is called: instructions, and what our code makes
# of them. Not here: pin(), which orders a compiler's registers; setmaxnreg, which has no memory;
# tcgen05.relinquish_alloc_permit, without which another block's allocation waits;
# let_next_start(), without which the next kernel starts later; and whatever gives a value, such as a
# shuffle or a barrier's vote.
ORDERING = [
    "wgmma_fence", "wgmma_commit", "wgmma_wait", "mbarrier_arrive", "mbarrier_arrive_cluster",
    "mbarrier_arrive_expect_bytes", "mbarrier_wait", "cp_async_arrive", "fence_mbarrier_init",
    "fence_proxy_async", "tma_store_commit", "tma_store_wait_read", "tma_store_wait",
    "barrier_sync", "barrier_arrive", "cluster_sync", "__syncthreads", "__syncwarp",
    "__threadfence", "cudaGridDependencySynchronize", "wait_for_data", "wait_for_previous",
    "wait_empty", "wait_full", "wait", "wait_for_stores", "fill", "release", "release_previous",
    "release_block", "sync", "finish", "tcgen05_commit", "tcgen05_fence_before_sync",
    "tcgen05_fence_after_sync", "tensor_memory_allocate", "tensor_memory_free",
    "tensor_memory_wait_loads", "land", "tcgen05_commit_pair", "mbarrier_arrive_release_cluster",
    "mbarrier_wait_acquire_cluster", "wait_empty_in_all", "wait_full_in_all", "wait_for_last",
    "tell", "tell_full", "tell_empty", "tell_when_done",
]
# Of the same name, but an epilogue's arithmetic.
OTHER_CALLS = re.compile(r"(?:\w+\.)?finish\((?!D?\))")
# A call that is a statement by itself: after the end of another, a brace, a condition or `else`.
CALL = re.compile(
    r"(?:(?<=[;{})])|(?<=\belse))\s*"
    r"(?P<call>(?:\w+(?:<[^;(){}]*>)?(?:::|\.|->))*(?:template\s+)?"
    rf"(?P<name>{'|'.join(ORDERING)})(?:<[^;(){{}}]*>)?\((?:[^();]|\([^();]*\))*\))\s*;")


@dataclasses.dataclass(frozen=True)
class Defect:
    id: str
    file: pathlib.Path  # from the root
    begin: int  # of what is replaced, in the file
    end: int
    new: str

    def applied_to(self, text):
        return text[:self.begin] + self.new + text[self.end:]

    def matches(self, pattern):
        return fnmatch.fnmatch(self.id, pattern)


def blank(found):
    return re.sub(r"[^\n]", " ", found.group())


def code_of(text):
    """The text without comments, however it is broken into lines."""
    return " ".join(re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S).split())


def statements_of(text):
    """The text with comments, preprocessor lines and what concepts require blanked out, as long as
    it was."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/|^#[^\n]*", blank, text, flags=re.S | re.M)
    nested = r"(?:[^{}]|\{[^{}]*\})*"
    return re.sub(rf"(?<=[=&])\s*requires\s*\((?:[^()]|\([^()]*\))*\)\s*\{{{nested}\}}", blank, text)


def dropped_calls(root):
    for folder in FOLDERS:
        for file in sorted((root / CUDA / folder).rglob("*")):
            if file.suffix not in (".h", ".cu"):
                continue
            text = file.read_text()
            known = collections.Counter()
            for found in CALL.finditer(statements_of(text)):
                if OTHER_CALLS.match(found["call"]):
                    continue
                known[found["name"]] += 1
                name = f"drop/{file.relative_to(root / CUDA).as_posix()}:{found['name']}"
                if known[found["name"]] > 1:
                    name += f".{known[found['name']]}"
                yield Defect(name, file.relative_to(root), *found.span("call"), "(void)0")


def listed_changes(root):
    for change in CHANGES:
        file = CUDA / change.file
        text = (root / file).read_text()
        place = change.within or change.old
        if text.count(place) != 1 or place.count(change.old) != 1:
            sys.exit(f"mutants.py: error: {change.id}: its text stands {text.count(place)} times in "
                     f"{file}, not once; changes.py is to follow the sources")
        begin = text.index(place) + place.index(change.old)
        yield Defect(change.id, file, begin, begin + len(change.old), change.new)


def all_defects(root=ROOT):
    return [*dropped_calls(root), *listed_changes(root)]


def line_of(defect, root=ROOT):
    """What the list shows: the call, or the first line of the text."""
    return (root / defect.file).read_text()[defect.begin:defect.end].strip().split("\n")[0].strip()


def number_of_line(defect, root=ROOT):
    return (root / defect.file).read_text().count("\n", 0, defect.begin) + 1


def find(name):
    defects = all_defects()
    for number, defect in enumerate(defects, start=1):
        if name in (defect.id, str(number)):
            return defect
    sys.exit(f"mutants.py: error: no defect is called {name}; `list` names them")


def write_sources(defect, folder):
    """src/ as it is here but for one file."""
    if folder.exists() and any(folder.iterdir()):
        sys.exit(f"mutants.py: error: {folder} is not empty")
    shutil.copytree(ROOT / "src", folder / "src")
    file = folder / defect.file
    file.write_text(defect.applied_to(file.read_text()))
