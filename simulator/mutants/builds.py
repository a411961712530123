"""Builds programs with every defect behind a number, in a copy of the checkout, and packs them for
machines without a compiler or git."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys

from defects import ROOT, all_defects, code_of, line_of, number_of_line
from switches import write_gpu_header, write_gpu_switches, write_switches

# Of the layer, and of cases whose names begin with "router-".
SIMULATORS = ["tilemoe_simulate", "tilemoe_simulate_router"]
GPU_PROGRAM = "tilemoe_cuda_cases"
PLACES_PROGRAM = "tilemoe_cuda_places"  # the same, which has no defects and notes their places
KINDS = ["simulator", "gpu"]
SIMULATOR_OPTIONS = ["-DTILEMOE_CUDA=OFF"]
# Both kits in machine code; warnings as CI has them, so that ccache knows the host's part.
GPU_OPTIONS = ["-DTILEMOE_CUDA=ON", "-DTILEMOE_CUDA_ARCHS=90a", "-DTILEMOE_SM80_ON_HOPPER=ON",
               "-DTILEMOE_TORCH=OFF", "-DTILEMOE_WERROR=ON"]
# Every system has them.
OF_THE_SYSTEM = re.compile(r"/(libc|libm|libdl|librt|libpthread|libstdc\+\+|libgcc_s)\.so")


def hash_of(texts):
    total = hashlib.sha256()
    for text in texts:
        total.update(text if isinstance(text, bytes) else text.encode())
        total.update(b"\0")
    return total.hexdigest()[:16]


def sources_hash(*folders, root=ROOT):
    """Of their code; comments may change."""
    files = [path for folder in folders for path in sorted((root / folder).rglob("*"))
             if path.suffix in (".h", ".cpp", ".cu", ".inc")]
    return hash_of(part for path in files
                   for part in (str(path.relative_to(root)), code_of(path.read_text())))


def defect_hash(defect):
    """Of what it is, and of its file's code."""
    text = (ROOT / defect.file).read_text()
    return hash_of([defect.id, code_of(text), code_of(defect.applied_to(text))])


def commit():
    return subprocess.run(["git", "describe", "--always", "--dirty", "--exclude=*"], cwd=ROOT,
                          text=True, capture_output=True).stdout.strip()


def compiler(kind):
    """Its line with the version."""
    said = subprocess.run(["c++" if kind == "simulator" else "nvcc", "--version"], text=True,
                          capture_output=True, check=True).stdout.splitlines()
    return said[0] if kind == "simulator" else next(line for line in said if "release" in line)


def copy_checkout(tree, products):
    """What git knows of, with only those products that are asked for."""
    files = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
                           cwd=ROOT, capture_output=True, check=True)
    for name in files.stdout.decode().split("\0")[:-1]:
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    table = tree / "src" / "cuda" / "instances" / "products.inc"
    table.write_text("".join(
        line for line in table.read_text().splitlines(keepends=True)
        if not line.startswith("PRODUCT(") or re.search(products, line)))


def keep_times(old, new):
    """Of what has not changed, so that it is not built again."""
    for path in new.rglob("*"):
        was = old / path.relative_to(new)
        if path.is_file() and was.is_file() and was.read_bytes() == path.read_bytes():
            times = was.stat()
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def libraries_of(programs):
    """The shared libraries that they need and that another machine may not have."""
    said = subprocess.run(["ldd", *programs], text=True, capture_output=True, check=True).stdout
    return sorted({path for path in re.findall(r"=> (/\S+)", said)
                   if not OF_THE_SYSTEM.search(path)})


def pack(kind, made, folder, products):
    """Programs by their names, and their libraries, in folder/programs; with what is known of them.
    programs.tar.xz beside it is the same."""
    programs = folder / "programs"
    for name in ("bin", "lib"):
        shutil.rmtree(programs / name, ignore_errors=True)
        (programs / name).mkdir(parents=True)
    if kind == "simulator":  # it asks for the lines of its findings
        made = {**made, "addr2line": shutil.which("addr2line")}
    for name, program in made.items():
        shutil.copy2(program, programs / "bin" / name)
    for library in libraries_of(made.values()):
        shutil.copy(library, programs / "lib")
    subprocess.run(["strip", "--strip-unneeded", *(programs / "lib").iterdir()], check=True)
    if kind == "gpu":
        subprocess.run(["strip", *(programs / "bin" / name for name in made)], check=True)
    (programs / "built.json").write_text(json.dumps({
        "kind": kind, "commit": commit(), "compiler": compiler(kind), "products": products,
        "sources": sources_hash("src", "verify", *(["simulator"] if kind == "simulator" else [])),
        "defects": [{"id": one.id, "file": str(one.file), "line": number_of_line(one),
                     "text": line_of(one), "hash": defect_hash(one)}
                    for one in all_defects()]}, indent=1) + "\n")
    subprocess.run(["tar", "-I", "xz -T1 -3 --lzma2=dict=64MiB", "-C", folder, "-cf",
                    folder / "programs.tar.xz", "programs"], check=True)
    return programs


def build(kind, args):
    """Makes the programs of that kind; returns the folder that they are packed in. The copy's build
    is as deep as a checkout's own, so that ccache knows what has no defects."""
    folder = args.build.resolve()
    tree = folder / "tree"
    old = folder / "tree.old"
    if (old / "build").exists():  # a build broke off before it was moved
        shutil.rmtree(tree, ignore_errors=True)
    elif tree.exists():
        tree.rename(old)
    copy_checkout(tree, args.products)
    if kind == "simulator":
        write_switches(tree, all_defects())
        options = SIMULATOR_OPTIONS
    else:
        options = GPU_OPTIONS + write_gpu_switches(tree, all_defects())
        write_gpu_header(tree, places=False)
    keep_times(old, tree)
    if (old / "build").exists():
        (old / "build").rename(tree / "build")
    shutil.rmtree(old, ignore_errors=True)
    made = tree / "build" / "defects"
    subprocess.run(["cmake", "-S", tree, "-B", made, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
                    *options, *args.cmake], check=True, stdout=subprocess.DEVNULL)

    def ninja(*targets):
        subprocess.run(["ninja", "-C", made, f"-j{args.jobs}", *targets], check=True,
                       stdout=sys.stderr)

    if kind == "simulator":
        ninja(*SIMULATORS)
        return pack(kind, {name: made / "simulator" / name for name in SIMULATORS}, folder,
                    args.products)
    program, with_defects = made / "tests" / "cuda" / GPU_PROGRAM, folder / GPU_PROGRAM
    ninja(GPU_PROGRAM)
    shutil.copy2(program, with_defects)
    write_gpu_header(tree, places=True)
    ninja(GPU_PROGRAM)
    return pack(kind, {GPU_PROGRAM: with_defects, PLACES_PROGRAM: program}, folder, args.products)
