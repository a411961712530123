"""What gpu_peers.py and gpu_kits.py share: `python -m tilemoe.bench` a layer at a time, each kept
when it is done, so that a run which was cut off goes on where it stopped."""

import hashlib
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "scripts" / "gpu"))
import device  # noqa: E402

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


def add_options(parser, layers, out):
    """Those of every such script."""
    add = parser.add_argument
    add("--tilemoe", type=pathlib.Path, help="a folder with the package; else this Python's own")
    add("--cache", type=pathlib.Path, help="a folder for what peers compile")
    add("--compile-only", action="store_true",
        help="have peers compile into --cache what these layers need, and measure nothing")
    add("--rounds", type=int, default=15)
    add("--config", nargs="+", default=layers, help="layers, see `python -m tilemoe.bench --list`")
    add("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: to try this script itself")
    add("--seconds", type=float, default=540, help="begin no layer and stop after so many")
    add("--again", action="store_true", help="measure also what was measured before")
    add("--out", type=pathlib.Path, default=pathlib.Path(out))
    add("--also", type=pathlib.Path, nargs="*", default=[], metavar="FILE",
        help="results of other GPUs of this name, by the same packages: their layers count too")


def require_folders(script, *folders):
    for folder in folders:
        if folder and not folder.is_dir():
            sys.exit(f"{script}: error: {folder} is not there")


def package_folders(script, given):
    """Of the tilemoe that `python -m tilemoe.bench` will be."""
    if given:
        return [given / "tilemoe"]
    found = importlib.util.find_spec("tilemoe")
    if found is None:
        sys.exit(f"{script}: error: this Python has no tilemoe; name its folder by --tilemoe")
    libraries = os.environ.get("TILEMOE_LIBRARY_DIR")
    return [pathlib.Path(found.origin).parent, *([pathlib.Path(libraries)] if libraries else [])]


def packages_options(places):
    """The bench's, for {peer: its folder of packages}."""
    options = [f"{name}={folder.resolve()}" for name, folder in places.items()]
    return ["--packages", *options] if options else []


def facts(script, args, peers, folders):
    """What has to be equal for a result to be kept. folders: {package: its folders}."""
    where = (
        {"name": "CPU", "driver_version": None}
        if args.device == "cpu"
        else device.facts(script, "name", "driver_version", "clocks.max.sm", "power.limit")
    )
    return {
        **where,
        "rounds": args.rounds,
        "peers": peers,
        "packages": {name: fingerprint(of) for name, of in folders.items()},
    }


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


def bench(args, *options, seconds):
    """Runs `python -m tilemoe.bench`; whether it ended well, and how it ended. From the first call
    on, what tells this program to end ends the bench too."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
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


class Runs:
    """The layers of a results file, `stage` by name: {item, status, seconds, report}.

    layers: in whose order they stand; here: `facts`; judge: of the items that passed, what the file
    says of them all."""

    def __init__(self, args, stage, layers, here, judge=lambda items: {}):
        self.args, self.stage, self.layers, self.here = args, stage, layers, here
        self.judge = judge
        self.end = time.monotonic() + args.seconds
        self.items = {}
        own = [args.out] if args.out.exists() and not args.again else []
        for file in [*args.also, *own]:
            before = json.loads(file.read_text())
            if {key: before.get(key) for key in here} == here:
                self.items |= {i["item"]: i for i in before["items"] if i["status"] == "passed"}
            elif file != args.out:
                sys.exit(f"error: {file} was measured elsewhere, otherwise or with other packages")
        self.kept = set(self.items)
        for folder in (args.out.parent / stage, args.cache):
            if folder:
                folder.mkdir(parents=True, exist_ok=True)

    def left(self):
        return self.end - time.monotonic()

    def compile_ahead(self, peers, modules, options):
        """Has peers compile what the command's layers need, once for each cache folder, GPU and
        version of their modules, where there is a cache to keep it. With --compile-only that is all:
        this ends the program."""
        if not self.args.cache:
            return
        done = self.kept.issuperset(self.args.config) or self._compiled(peers, modules, options)
        if self.args.compile_only:
            sys.exit(0 if done else 1)

    def _compiled(self, peers, modules, options):
        """Whether the cache has it now."""
        done = self.args.cache / f"compiled-{self.stage}.json"
        key = {
            "gpu": self.here["name"],
            "modules": fingerprint(modules),
            "layers": self.args.config,
        }
        if done.exists() and json.loads(done.read_text()) == key:
            return True
        say(f"compiling {', '.join(peers)}")
        words = ["--compile-only", "--config", *self.args.config, "--against", *peers, *options]
        good, how = bench(self.args, *words, seconds=self.left())
        if good:
            done.write_text(json.dumps(key) + "\n")
        else:
            say(f"  {how}: run me again to go on")
        return good

    def run(self, *options):
        """Every layer of the command that is not kept. options: the bench's."""
        if self.args.compile_only:
            sys.exit("error: --compile-only needs a --cache, and the folder of a peer that compiles")
        for name in self.args.config:
            if name in self.kept:
                say(f"{name}: measured before")
                continue
            if self.left() < min(LEAST_SECONDS, self.args.seconds / 2):
                self.items[name] = {"item": name, "status": "not begun: the time was over"}
                continue
            self.items[name] = self._measured(name, options)
            self.write()

    def _measured(self, name, options):
        file = self.args.out.parent / self.stage / f"{name}.json"
        begin = time.monotonic()
        good, how = bench(
            self.args,
            *("--config", name, "--rounds", self.args.rounds, "--json", file, *options),
            seconds=self.left(),
        )
        item = {
            "item": name,
            "status": "passed" if good else how,
            "seconds": round(time.monotonic() - begin, 1),
        }
        return item | ({"report": json.loads(file.read_text())} if good else {})

    def write(self):
        names = dict.fromkeys([*self.layers, *self.args.config, *self.items])
        unique = [self.items[name] for name in names if name in self.items]
        judged = self.judge([item for item in unique if item["status"] == "passed"])
        whole = {"stage": self.stage, **self.here, **judged, "items": unique}
        self.args.out.write_text(json.dumps(whole, indent=1) + "\n")

    def reports(self):
        """Those of the command's layers."""
        found = (self.items[name].get("report") for name in self.args.config)
        return [report for report in found if report]

    def missing(self):
        """A line for each of the command's layers that was not measured, and for each peer that was
        left out."""
        lines = []
        for name in self.args.config:
            item = self.items[name]
            if item["status"] != "passed":
                lines.append(f"{name}: {item['status']}")
            for entry in item.get("report", [])[:1]:
                lines += [f"{name}: without {p}: {why}" for p, why in entry["left_out"].items()]
        return lines
