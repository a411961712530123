"""The stages of run.py that need several GPUs of one host.

ranks     correctness over the links between the GPUs; about 300 s on 2 GPUs, 420 s on 4
parallel  time and memory of a layer with expert parallelism; about 250 s per number of GPUs
fsdp      training of examples/pretrain with FSDP-2; about 240 s on 2 GPUs, 420 s on 4

NVLink multicast is off: a program that fails while it uses multicast can leave the GPUs of a host
unusable.
"""

import json

from stages import ROOT, TESTS, pretrain_losses, records, scenario_results, shared_gpu_results

WITHOUT_MULTICAST = ["env", "NCCL_NVLS_ENABLE=0", "TORCH_SYMM_MEM_DISABLE_MULTICAST=1",
                     "NVSHMEM_DISABLE_NVLS=1"]
MAX_RANKS = 4  # of the scenarios of tests/torch
LAYERS = ["qwen3-235b", "30b-n256", "qwen3-next"]
WAYS = ["own", "lossless", "lossless@4", "serial", "serial@4", "chunks-auto", "pull-lossless",
        "pull", "usual", "torchtitan"]
EXAMPLE = ROOT / "examples" / "pretrain"
TEXT = ("docs", "include", "src", "python", "tests")  # of the corpus
SHORT = 16  # layers of the 7B model that fit one GPU of 80 GB
SHORT_BATCH = 4  # micro-batch of these layers, in sequences per GPU
LARGE_GIB = 120
# Micro-batches of the whole model, on two GPUs and on more; key: whether the GPUs are large.
BATCHES = {False: (3, 3), True: (11, 14)}
SHARED_BATCHES = {False: (2, 3), True: (7, 8)}  # with shared experts


def numbers_of_gpus(machine):
    """Return 2, 4, 8 and so on, as many as the machine has."""
    return [count for count in (2, 4, 8) if count <= len(machine.gpus)] or [2]


def is_large(machine):
    """Return whether each GPU has LARGE_GIB or more."""
    return min(machine.gpus, default=0) >= LARGE_GIB * 1024


def item_of(machine, name, arguments, limit_s, report, gpus=2):
    return machine.torch_item(name, arguments, limit_s, report, gpus=gpus, tool=WITHOUT_MULTICAST)


def fp8_shards(machine):
    """Train with the fp8 recipe while FSDP-2 gathers quantised shards, and experts on two ranks."""
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
             TESTS / "fp8_shards_worker.py", "--device", "cuda"]
    return item_of(machine, "fp8-shards", words, 150, passed_cases)


def passed_cases(output):
    """Return {case: passed} from the errors that a worker's first process prints as JSON."""
    printed = [line for line in output.splitlines() if line.startswith("{")]
    if not printed:
        raise ValueError("no case was reported")
    found = json.loads(printed[-1])
    if failed := [name for name, error in found.items() if error is not None]:
        raise ValueError(f"failed: {', '.join(failed)}")
    return dict.fromkeys(found, "passed")


def ranks(machine, folder):
    """Run the scenarios of ranks with one GPU each: collectives by NCCL, pulls over NVLink."""
    world = min(numbers_of_gpus(machine)[-1], MAX_RANKS)
    pulled, losses = folder / "pull", folder / "pretrain.json"
    worker = [TESTS / "expert_parallel_worker.py", "--device", "cuda", "--world", str(world),
              "--limit", "380"]
    alone = [TESTS / "expert_parallel_one_gpu.py", "--device", "cuda", "--world", str(world),
             "--links", "nccl", "--folder", pulled, "--limit", "90"]
    training = [ROOT / "scripts" / "gpu" / "pretrain_two_gpus.py", "--json", losses, "--work",
                folder / "pretrain", "--only", "shared experts"]
    return [
        item_of(machine, "pull", alone, 105, lambda output: shared_gpu_results(output, pulled / "0.log"),
                gpus=world),
        item_of(machine, "expert-parallel", worker, 400, scenario_results, gpus=world),
        item_of(machine, "adapters", [*worker, "--only", "low_rank_adapters"], 60,
                scenario_results, gpus=world),
        fp8_shards(machine),
        item_of(machine, "pretrain-shared-experts", training, 150,
                lambda _: pretrain_losses(losses)),
    ]


def parallel(machine, folder):
    """Compare expert parallelism with an all-to-all, in graphs for small T."""
    def item(world, tokens, limit_s, more=()):
        name = f"{world}-gpus-t{tokens}"
        file = folder / f"{name}.jsonl"
        words = [ROOT / "benchmarks" / "expert_parallel.py", "--world", str(world), "--layers",
                 *LAYERS, "--tokens", str(tokens), "--ways", *WAYS, "--rounds", "9", *more,
                 "--json", file]
        return item_of(machine, name, words, limit_s, lambda _: records.read(file), gpus=world)

    return [one for world in numbers_of_gpus(machine)
            for one in (item(world, 32768, 240), item(world, 4096, 180, ["--graph"]))]


def fsdp(machine, folder):
    """Train the 7B model with FSDP-2, and as many of its layers as one GPU holds, for scaling."""
    corpus = folder / "corpus"

    def item(name, processes, batch, more):
        file = folder / f"{name}.jsonl"
        words = [EXAMPLE / "speed.py", "measure", "--data", corpus, "--out", file, "--config", "7B",
                 "--processes", str(processes), "--micro-batches", str(batch), "--rounds", "1",
                 "--warmup-steps", "4", "--measured-steps", "8", "--profile", "0",
                 "--implementations", "tilemoe", *more]
        return item_of(machine, name, words, 200, lambda _: trained(file), gpus=processes)

    def batch(batches, processes):
        return batches[is_large(machine)][processes > 2]

    counts = numbers_of_gpus(machine)
    return [
        *corpus_items(machine, corpus),
        *(item(f"7b-{count}-gpus", count, batch(BATCHES, count), ["--compile"]) for count in counts),
        # Not compiled, as --expert-parallel requires.
        item(f"7b-{counts[-1]}-gpus-shared-experts", counts[-1],
             batch(SHARED_BATCHES, counts[-1]), ["--expert-parallel", "2"]),
        *(item(f"{SHORT}-layers-{count}-gpus", count, SHORT_BATCH,
               ["--compile", "--layers", str(SHORT)]) for count in (1, *counts)),
    ]


def corpus_items(machine, corpus, text=tuple(ROOT / name for name in TEXT), limit_s=60):
    """Return items: one that makes a corpus, by default of the repository's text, or none if it has."""
    if (corpus / "manifest.json").exists():  # of an earlier call
        return []
    words = [EXAMPLE / "corpus.py", corpus, *text, "--vocabulary", "16384"]
    return [item_of(machine, "corpus", words, limit_s, lambda _: tokens_in(corpus), gpus=1)]


def tokens_in(corpus):
    """Return the number of tokens of a corpus."""
    return {"tokens": json.loads((corpus / "manifest.json").read_text())["train"]["tokens"]}


def trained(file):
    """Return the measurements of a training; raise ValueError if it did not fit."""
    found = records.read(file)
    if not found or any("does_not_fit" in one.values for one in found):
        raise ValueError("nothing was measured, or the model does not fit")
    return found


STAGES = {"ranks": ranks, "parallel": parallel, "fsdp": fsdp}
