#!/usr/bin/env python3
"""TileMoE beside sonic-moe and torch's grouped_mm, all from PyTorch, on ten layers and one GPU.

  python3 benchmarks/gpu_peers.py --tilemoe DIR --sonic-moe DIR --cache DIR

Each DIR holds Python packages, as `pip install --target DIR` leaves them; sonic-moe runs in a
process of its own. A round runs every peer once; 15 rounds give medians, and medians of the rounds'
ratios (python/tilemoe/bench has how). Results are kept a layer at a time: run it again after it was
cut off, or after it stopped at --seconds, and it goes on. Its status is 1 until all layers are
measured with all peers. First of all sonic-moe compiles what the layers need, several at once;
--cache keeps that.

  --before DIR     another build of TileMoE, in the same rounds: what a change did
  --rounds 51      for differences under a percent

It writes build/gpu/gpu_peers.json; benchmarks/gpu_tables.py makes the pages' tables of it.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "scripts" / "gpu"))
import device  # noqa: E402

LAYERS = [
    "7b-n256",
    "7b-n1024",
    "30b-n256",
    "olmoe",
    "gpt-oss-20b",
    "qwen3-235b",
    "kimi-linear",
    "qwen3-next",
    "wide",
    "few-rows",
]
GROUPED_MM = ["torch-grouped_mm-compiled", "torch-grouped_mm"]
LEAST_SECONDS = 60  # for a layer to be begun


def say(text):
    print(text, file=sys.stderr, flush=True)


def fingerprint(folders):
    """Of a package's files: what was measured with others is measured again."""
    whole = hashlib.sha256()
    for folder in folders:
        for file in sorted(folder.rglob("*")):
            if file.suffix in (".py", ".so"):
                whole.update(str(file.relative_to(folder)).encode() + file.read_bytes())
    return whole.hexdigest()[:16]


def package_folders(given):
    """Of the tilemoe that `python -m tilemoe.bench` will be."""
    if given:
        return [given / "tilemoe"]
    found = importlib.util.find_spec("tilemoe")
    if found is None:
        sys.exit("gpu_peers.py: error: this Python has no tilemoe; name its folder by --tilemoe")
    libraries = os.environ.get("TILEMOE_LIBRARY_DIR")
    return [pathlib.Path(found.origin).parent, *([pathlib.Path(libraries)] if libraries else [])]


def peers(args):
    """Their names, and the options that say where they are."""
    places = {"tilemoe-before": args.before, "sonic-moe": args.sonic_moe}
    places = {name: folder for name, folder in places.items() if folder}
    options = [f"{name}={folder.resolve()}" for name, folder in places.items()]
    names = ["tilemoe-keeps-h", *places, *GROUPED_MM] if args.against is None else args.against
    return names, ["--packages", *options] if options else []


def environment(args):
    found = dict(os.environ)
    if args.tilemoe:
        found["PYTHONPATH"] = str(args.tilemoe.resolve())
        found.pop("TILEMOE_LIBRARY_DIR", None)
    if args.cache:
        folder = args.cache.resolve()
        # quack keeps its compiled kernels and the tiles it chose; Triton and torch.compile theirs.
        found |= {
            "QUACK_CACHE_DIR": str(folder / "quack"),
            "QUACK_CACHE_AUTOTUNING": "1",
            "CUTE_DSL_CACHE_DIR": str(folder / "cute"),
            "TRITON_CACHE_DIR": str(folder / "triton"),
            "TRITON_CACHE_AUTOTUNING": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        }
    return found


def facts(args):
    """What has to be equal for a result to be kept."""
    folders = {"tilemoe": package_folders(args.tilemoe)}
    if args.before:
        folders["tilemoe-before"] = [args.before / "tilemoe"]
    where = (
        {"name": "CPU", "driver_version": None}
        if args.device == "cpu"
        else device.facts("gpu_peers.py", "name", "driver_version", "clocks.max.sm", "power.limit")
    )
    return {
        **where,
        "rounds": args.rounds,
        "peers": peers(args)[0],
        "packages": {name: fingerprint(of) for name, of in folders.items()},
    }


def bench(args, *options, seconds):
    """Runs `python -m tilemoe.bench`; whether it ended well, and how it ended."""
    command = [sys.executable, "-m", "tilemoe.bench", "--device", args.device, *map(str, options)]
    process = subprocess.Popen(command, env=environment(args), start_new_session=True)
    try:
        status = process.wait(timeout=seconds)
        return status == 0, f"exit status {status}"
    except subprocess.TimeoutExpired:
        return False, f"not done in {seconds:.0f} s"
    finally:
        if process.poll() is None:  # with what it has begun: compilers and workers
            os.killpg(process.pid, 9)
            process.wait()


def compile_ahead(args, options, gpu, left):
    """Once for each cache folder, GPU and sonic-moe."""
    done = args.cache / "compiled.json"
    key = {
        "gpu": gpu,
        "sonic-moe": fingerprint([args.sonic_moe / "sonicmoe", args.sonic_moe / "quack"]),
        "layers": args.config,
    }
    if done.exists() and json.loads(done.read_text()) == key:
        return
    say("compiling sonic-moe's kernels")
    good, how = bench(
        args,
        "--compile-only",
        "--config",
        *args.config,
        "--against",
        "sonic-moe",
        *options,
        seconds=left(),
    )
    if good:
        done.write_text(json.dumps(key) + "\n")
    else:
        say(f"  {how}: run me again to go on")


def summary(item):
    """A line for each peer: times, memory above what the caller owns, our time over theirs."""
    ours = item["report"][0]
    for entry in item["report"]:
        times = " / ".join(f"{entry[key]:.3f}" for key in ("fwd_ms", "bwd_ms"))
        line = f"{item['item']:12} {entry['backend']:26} {times} ms"
        for key in ("peak_bytes", "reserved_bytes", "floor_bytes"):
            if key in entry:
                above = (entry[key] - entry["resident_bytes"]) / 2**20
                line += f", {key.removesuffix('_bytes')} {above:.0f} MiB"
        if ratios := ours["time_of_peers"].get(entry["backend"]):
            line += "; tilemoe over it: " + ", ".join(f"{k} {v:.4f}" for k, v in ratios.items())
        yield line


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = lambda name, **of: parser.add_argument(name, **of)
    add("--tilemoe", type=pathlib.Path, help="a folder with the package; else this Python's own")
    add("--before", type=pathlib.Path, help="a folder with another build of it")
    add("--sonic-moe", type=pathlib.Path, help="a folder with sonic-moe and what it needs")
    add("--cache", type=pathlib.Path, help="a folder for what peers compile")
    add(
        "--against",
        nargs="*",
        metavar="PEER",
        help="these alone, by their names in docs/benchmarks.md",
    )
    add("--rounds", type=int, default=15)
    add("--config", nargs="+", default=LAYERS, help="layers, see `python -m tilemoe.bench --list`")
    add("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: to try this script itself")
    add("--seconds", type=float, default=540, help="begin no layer and stop after so many")
    add("--again", action="store_true", help="measure also what was measured before")
    add("--out", type=pathlib.Path, default=pathlib.Path("build/gpu/gpu_peers.json"))
    args = parser.parse_args()
    for folder in (args.tilemoe, args.before, args.sonic_moe):
        if folder and not folder.is_dir():
            sys.exit(f"gpu_peers.py: error: {folder} is not there")
    end = time.monotonic() + args.seconds
    left = lambda: end - time.monotonic()

    names, options = peers(args)
    here = facts(args)
    kept = {}
    if args.out.exists() and not args.again:
        before = json.loads(args.out.read_text())
        if {key: before.get(key) for key in here} == here:
            kept = {item["item"]: item for item in before["items"] if item["status"] == "passed"}
    folder = args.out.parent / "peers"
    folder.mkdir(parents=True, exist_ok=True)
    if args.cache:
        args.cache.mkdir(parents=True, exist_ok=True)
    compiles = args.sonic_moe and args.cache and "sonic-moe" in names
    if compiles and any(name not in kept for name in args.config):
        compile_ahead(args, options, here["name"], left)

    items = dict(kept)
    for name in args.config:
        if name in kept:
            say(f"{name}: measured before")
            continue
        if left() < min(LEAST_SECONDS, args.seconds / 2):
            items[name] = {"item": name, "status": "not begun: the time was over"}
            continue
        file = folder / f"{name}.json"
        begin = time.monotonic()
        good, how = bench(
            args,
            "--config",
            name,
            "--rounds",
            args.rounds,
            "--against",
            *names,
            *options,
            "--json",
            file,
            seconds=left(),
        )
        items[name] = {
            "item": name,
            "status": "passed" if good else how,
            "seconds": round(time.monotonic() - begin, 1),
        }
        if good:
            items[name]["report"] = json.loads(file.read_text())
        ordered = [items[one] for one in [*LAYERS, *args.config] if one in items]
        unique = list({item["item"]: item for item in ordered}.values())
        args.out.write_text(
            json.dumps({"stage": "peers", **here, "items": unique}, indent=1) + "\n"
        )
    missing = [
        f"{name}: {items[name]['status']}"
        for name in args.config
        if items[name]["status"] != "passed"
    ]
    for name in args.config:
        for entry in items[name].get("report", [])[:1]:
            missing += [f"{name}: without {peer}: {why}" for peer, why in entry["left_out"].items()]
        if "report" in items[name]:
            print("\n".join(summary(items[name])))
    print("\n".join(missing) or f"all {len(args.config)} layers measured: {args.out}")
    sys.exit(1 if missing else 0)


if __name__ == "__main__":
    main()
