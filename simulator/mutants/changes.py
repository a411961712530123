"""Defects of the kernels by kind, each a change of one place. `old` stands in its file once.

What is dropped as a whole (a fence, an arrival, a wait) mutants.py finds by itself; here is what is
there, but wrong. Both are expressions or whole statements, so that one program can have all of them
and a number choose at run time (switches.py). What is a constant is changed where it is used.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Change:
    kind: str
    name: str
    file: str  # in src/cuda
    old: str
    new: str
    within: str = ""  # stands once in the file, and has `old` once; empty: `old` stands once

    @property
    def id(self):
        return f"{self.kind}/{self.name}"


CHANGES = [
    # ---- an ordinary fence where the asynchronous proxy needs its own
    Change("wrong-fence", "ragged-store", "sm90/store_ragged.h",
           "ptx::fence_proxy_async();", "__threadfence();"),
    Change("wrong-fence", "transposed-store", "sm90/store_transposed.h",
           "ptx::fence_proxy_async();", "__threadfence();"),
    Change("wrong-fence", "activation-gradient", "sm90/epilogue_activation_gradient.h",
           "ptx::fence_proxy_async();", "__threadfence();"),
    Change("wrong-fence", "copied-operand", "sm90/consume.h",
           "ptx::fence_proxy_async();", "__threadfence();"),
    Change("wrong-fence", "barriers", "sm90/ring.h",
           "ptx::fence_mbarrier_init();", "__threadfence();"),

    # ---- the other phase of a barrier
    Change("parity", "empty-sm90", "sm90/ring.h", "at.parity ^ 1", "at.parity"),
    Change("parity", "full-sm90", "sm90/ring.h",
           "ptx::mbarrier_wait(full(at.stage), at.parity);",
           "ptx::mbarrier_wait(full(at.stage), at.parity ^ 1);"),
    Change("parity", "skipped-tile", "core/ring_position.h",
           "parity ^= static_cast<uint32_t>(end / kStages) & 1;", ""),
    Change("parity", "empty-sm100", "sm100/ring.h", "at.parity ^ 1", "at.parity",
           within="ptx::mbarrier_wait(empty(at.stage), at.parity ^ 1);"),
    Change("parity", "full-sm100", "sm100/ring.h",
           "ptx::mbarrier_wait(full(at.stage), at.parity);",
           "ptx::mbarrier_wait(full(at.stage), at.parity ^ 1);"),
    Change("parity", "empty-sm80", "sm80/ring.h", "at.parity ^ 1", "at.parity"),
    Change("parity", "full-sm80", "sm80/ring.h",
           "ptx::mbarrier_wait(full(at), at.parity);",
           "ptx::mbarrier_wait(full(at), at.parity ^ 1);"),
    Change("parity", "late-lane", "load/produce.h",
           "if constexpr (Gemm::kThreadsCopy) ring.wait_empty(at);", "ring.wait_empty(at);"),
    Change("parity", "tile-line", "sm80/tile_line.h",
           "ptx::mbarrier_wait(ptx::shared_address(&told_[at.slot()]), at.parity());",
           "ptx::mbarrier_wait(ptx::shared_address(&told_[at.slot()]), at.parity() ^ 1);"),

    # ---- an arrival too few or too many
    Change("arrivals", "full-too-few-sm90", "sm90/ring.h",
           "kFullArrivals", "kFullArrivals > 1 ? kFullArrivals - 1 : 1",
           within="ptx::mbarrier_init(full(stage), kFullArrivals);"),
    Change("arrivals", "empty-too-few-sm90", "sm90/ring.h",
           "kReadingWarps * kCluster", "kReadingWarps * kCluster - 1"),
    Change("arrivals", "empty-hands-twice", "sm90/produce.h",
           "if constexpr (Gemm::kThreadsCopy) ptx::mbarrier_arrive(full);",
           "if constexpr (Gemm::kThreadsCopy) ptx::mbarrier_arrive(full), "
           "ptx::mbarrier_arrive(full);"),
    Change("arrivals", "turns-of-one-consumer", "sm90/consume.h",
           "ptx::barrier_sync(my_turn, kBoth);", "ptx::barrier_sync(my_turn, kBoth / 2);"),
    Change("arrivals", "full-too-many-sm80", "sm80/ring.h",
           "ptx::mbarrier_init(full(at), kWarps * kWarp);",
           "ptx::mbarrier_init(full(at), kWarps * kWarp + 1);"),
    Change("arrivals", "empty-too-few-sm80", "sm80/ring.h",
           "ptx::mbarrier_init(empty(at), kWarps * kWarp);",
           "ptx::mbarrier_init(empty(at), kWarps * kWarp - 1);"),
    Change("arrivals", "full-too-few-sm100", "sm100/ring.h",
           "kFullArrivals", "(kFullArrivals > 1 ? kFullArrivals - 1 : 1)",
           within="ptx::mbarrier_init(full(place), kFullArrivals + told_full);"),
    Change("arrivals", "empty-too-few-sm100", "sm100/ring.h",
           "kEmptyArrivals", "(kEmptyArrivals > 1 ? kEmptyArrivals - 1 : 1)",
           within="ptx::mbarrier_init(empty(place), kEmptyArrivals + told_empty);"),
    Change("arrivals", "full-too-many-sm100", "sm100/ring.h",
           "kFullArrivals", "kFullArrivals + 1",
           within="ptx::mbarrier_init(full(place), kFullArrivals + told_full);"),

    # ---- a stage released before what reads it has ended
    Change("early-release", "two-groups-under-way", "sm90/consume.h",
           "Products::template wait<1>();", "Products::template wait<2>();"),
    Change("early-release", "before-the-last-products", "sm90/consume.h",
           "  Products::finish(D);\n  ring.release(previous);",
           "  ring.release(previous);\n  Products::finish(D);"),
    Change("early-release", "this-stage", "sm90/consume.h",
           "Products::template wait<1>();\n      ring.release(previous);",
           "Products::template wait<1>();\n      ring.release(at.stage);"),
    Change("early-release", "first-step-sm80", "sm80/grouped_gemm.h",
           "        products.load(fragments[0], stage, 2);\n"
           "        Products::multiply(D, fragments[1]);\n"
           "        products.load(fragments[1], stage, 3);\n"
           "        ring.release(at);",
           "        ring.release(at);\n"
           "        products.load(fragments[0], stage, 2);\n"
           "        Products::multiply(D, fragments[1]);\n"
           "        products.load(fragments[1], stage, 3);"),
    Change("early-release", "before-the-last-fragments-sm80", "sm80/grouped_gemm.h",
           "        products.load(fragments[1], stage, 3);\n"
           "        ring.release(at);",
           "        ring.release(at);\n"
           "        products.load(fragments[1], stage, 3);"),
    Change("early-release", "stage-before-its-products-sm100", "sm100/multiply.h",
           "        products.multiply(D, at.stage * Gemm::kStageBytes, k_block == 0);\n"
           "        tell_when_done<kBlocks>(ring.empty(at.stage));",
           "        tell_when_done<kBlocks>(ring.empty(at.stage));\n"
           "        products.multiply(D, at.stage * Gemm::kStageBytes, k_block == 0);"),
    Change("early-release", "accumulator-before-its-last-products", "sm100/multiply.h",
           "if (k_block + 1 == k_blocks) tell_when_done<kBlocks>(accumulators.full(to.stage));",
           "if (k_block + 2 == k_blocks || k_blocks == 1)"
           " tell_when_done<kBlocks>(accumulators.full(to.stage));"),
    Change("early-release", "accumulator-before-it-is-stored", "sm100/store_tiles.h",
           "    epilogue.store(WarpAccumulators(tensor_memory + from.stage * kAccumulatorColumns), "
           "tile);\n    ptx::tcgen05_fence_before_sync();\n    __syncwarp();\n"
           "    if (threadIdx.x % kWarp == 0) accumulators.tell_empty(from.stage);",
           "    ptx::tcgen05_fence_before_sync();\n    __syncwarp();\n"
           "    if (threadIdx.x % kWarp == 0) accumulators.tell_empty(from.stage);\n"
           "    epilogue.store(WarpAccumulators(tensor_memory + from.stage * kAccumulatorColumns), "
           "tile);"),

    # ---- a field of tcgen05's words off
    Change("word", "group-stride", "sm100/mma.h",
           "Operand::kAtomBytes", "2 * Operand::kAtomBytes",
           within="tcgen05_descriptor(shared, Operand::kAtomBytes,"),
    Change("word", "chunk-stride", "sm100/mma.h",
           "Operand::kMajor == Major::kK ? 16 : Operand::kChunkBytes",
           "Operand::kMajor == Major::kK ? 16 : 2 * Operand::kChunkBytes"),
    Change("word", "version", "ptx/tcgen05_descriptors.h", "kVersion", "0",
           within="return kSwizzle128 | kVersion |"),
    Change("word", "swizzle", "ptx/tcgen05_descriptors.h", "kSwizzle128", "uint64_t{4} << 61",
           within="return kSwizzle128 | kVersion |"),
    Change("word", "majors", "sm100/mma.h", "kInstruction",
           "(kInstruction & ~(3u << 15)) | (A::kMajor == Major::kMN ? 1u << 16 : 0u) |"
           " (B::kMajor == Major::kMN ? 1u << 15 : 0u)",
           within="advance(b_, stage + step * B::kStepBytes), kInstruction,"),
    Change("word", "columns", "sm100/mma.h", "kInstruction",
           "(kInstruction & ~(63u << 17)) | (kInstruction >> 18 & 31u) << 17",
           within="advance(b_, stage + step * B::kStepBytes), kInstruction,"),
    Change("word", "rows", "sm100/mma.h", "kInstruction",
           "(kInstruction & ~(31u << 24)) | (kInstruction >> 25 & 15u) << 24",
           within="advance(b_, stage + step * B::kStepBytes), kInstruction,"),
    Change("word", "lanes", "sm100/grouped_gemm.h",
           "tensor_memory + (warp - kFirstStoringWarp) * kWarp * kLane", "tensor_memory"),
    Change("word", "overwrites-never", "sm100/mma.h", "!overwrites || step != 0", "true"),

    # ---- bytes of a stage miscounted
    Change("bytes", "of-one-operand", "load/produce.h",
           "Gemm::kTmaBytes", "Gemm::LoadB::kTmaBytes",
           within="if (!has_weights) ptx::mbarrier_arrive_expect_bytes(full, Gemm::kTmaBytes)"),
    Change("bytes", "a-row-too-few", "load/produce.h",
           "Gemm::kTmaBytes", "Gemm::kTmaBytes - 128",
           within="if (!has_weights) ptx::mbarrier_arrive_expect_bytes(full, Gemm::kTmaBytes)"),
    Change("bytes", "a-chunk-too-many", "load/produce.h",
           "Gemm::kTmaBytes", "Gemm::kTmaBytes + 16",
           within="if (!has_weights) ptx::mbarrier_arrive_expect_bytes(full, Gemm::kTmaBytes)"),
    Change("bytes", "of-half-of-H", "sm90/produce.h", "Load::kTmaBytes", "Load::kTmaBytes / 2"),

    # ---- a swizzle or stride that is another's. (One that writes each place once, and reads what was
    # written, gives wrong numbers and no more: a test's to find.)
    Change("swizzle", "sum", "core/operand.h", "chunk ^ (row & 7)", "chunk + (row & 7)"),
    Change("swizzle", "chunks-of-32-bytes", "core/operand.h",
           "(chunk ^ (row & 7)) * 16", "(chunk ^ (row & 7)) * 32"),
    Change("swizzle", "group-stride", "sm90/mma.h",
           "Operand::kAtomBytes", "2 * Operand::kAtomBytes",
           within="ptx::wgmma_descriptor(shared, Operand::kAtomBytes,"),
    Change("swizzle", "chunk-stride", "sm90/mma.h",
           "Operand::kMajor == Major::kK ? 16 : Operand::kChunkBytes",
           "Operand::kMajor == Major::kK ? 16 : 2 * Operand::kChunkBytes"),
    Change("swizzle", "ragged-store", "sm90/store_ragged.h",
           "(place_ + slot * kSlotBytes) ^ b * 16", "(place_ + slot * kSlotBytes) + b * 16"),
    Change("swizzle", "slice-of-H", "sm90/slice_of_h.h", "place_ ^ block * 32",
           "place_ + block * 32"),
    Change("swizzle", "fragments-sm80", "sm80/mma.h", "((sum_half ^ eight) * 16)",
           "((sum_half + eight) * 16)"),

    # ---- a guard of rows or columns missing
    Change("guard", "stored-row", "epilogue/store_threads.h",
           "r < row_end && column + first < out.columns", "column + first < out.columns"),
    Change("guard", "stored-column", "epilogue/store_threads.h",
           "r < row_end && column + first < out.columns", "r < row_end"),
    Change("guard", "row-of-ds", "sm90/epilogue_activation_gradient.h", "r < row_end", "true",
           within="lane() % 4 < 2 && r < row_end && params_.ds_partial"),
    Change("guard", "row-of-dW", "epilogue/weight_gradient.h",
           "if (row >= size.rows) continue;", ""),
    Change("guard", "column-of-dW", "epilogue/weight_gradient.h",
           "if (column + 8 * j >= size.columns) break;", ""),
    Change("guard", "row-of-combine", "rowwise/combine.cu",
           "if (t >= params.outputs) return;", "if (t > params.outputs) return;"),
    Change("guard", "of-no-tile-sm80", "sm80/load_ahead.h",
           "if (left_ <= 0) return;", "",
           within="if (left_ <= 0) return;  // of a block that has no tile, loaders have not begun"),

    # ---- a slot written while what was stored through it is still read
    Change("slot", "ragged-store", "sm90/store_ragged.h",
           "ptx::tma_store_wait_read<0>();", "ptx::tma_store_wait_read<1>();"),
    Change("slot", "transposed-store", "sm90/store_transposed.h",
           "ptx::tma_store_wait_read<kSlots - 1>();", "ptx::tma_store_wait_read<kSlots>();"),
    Change("slot", "last-slice-of-H", "sm90/epilogue_activation_gradient.h",
           "ptx::tma_store_wait_read<0>();", "ptx::tma_store_wait_read<1>();"),
    Change("slot", "slice-before-of-H", "sm90/epilogue_activation_gradient.h",
           "ptx::tma_store_wait_read<1>();", "ptx::tma_store_wait_read<2>();"),
    Change("slot", "tile-line", "sm80/tile_line.h", "at.advance(kSlots)", "at.advance(2)"),

    # ---- the cluster's other block forgotten
    Change("cluster", "not-waited-for", "sm90/grouped_gemm.h",
           "ptx::cluster_sync();", "__syncthreads();"),
    Change("cluster", "not-told", "sm90/ring.h",
           "if (threadIdx.x % kWarp >= kCluster) return;",
           "if (threadIdx.x % kWarp >= 1) return;"),
    Change("cluster", "the-first-told-twice", "sm90/ring.h",
           "lane < kCluster ? lane : 0", "0 * lane"),
    Change("cluster", "its-readers-not-counted", "sm90/ring.h",
           "ptx::mbarrier_init(empty(stage), kReadingWarps * kCluster);",
           "ptx::mbarrier_init(empty(stage), kReadingWarps);"),
    Change("cluster", "nothing-brought", "load/cluster_boxes.h", "(1 << kBlocks) - 1", "1"),

    # ---- the other block of a pair forgotten
    Change("pair", "not-waited-for", "sm100/grouped_gemm.h",
           "ptx::cluster_sync();", "__syncthreads();"),
    Change("pair", "not-told", "sm100/multiply.h", "0b11", "0b01"),
    Change("pair", "its-stages-not-counted", "sm100/grouped_gemm.h",
           "is_first ? kOthers : 0", "0"),
    Change("pair", "its-readers-not-counted", "sm100/grouped_gemm.h",
           "is_first ? kOthers * kStoringWarps : 0", "0"),
    Change("pair", "parity-full", "sm100/ring.h",
           "ptx::mbarrier_wait_acquire_cluster(full(at.stage), at.parity);",
           "ptx::mbarrier_wait_acquire_cluster(full(at.stage), at.parity ^ 1);"),

    # ---- rows past an expert's last
    Change("past-end", "gathered-sm90", "load/gathered_rows.h",
           "row >= tile.row_end", "row > tile.row_end"),
    Change("past-end", "gathered-sm80", "sm80/load_rows.h",
           "row >= tile.row_end || !stage_.has(i)", "row > tile.row_end || !stage_.has(i)"),
    Change("past-end", "summed-sm90", "load/summed_rows.h",
           "if (row >= row_end_) return kNone;", "if (row > row_end_) return kNone;"),
    Change("past-end", "summed-sm80", "sm80/load_summed_rows.h",
           "row < row_end_", "row <= row_end_"),
    Change("past-end", "stored-sm90", "sm90/store_ragged.h",
           "ptx::tma_store(&out.map, slots + slot * kSlotBytes, column + slot * kSlice,\n"
           "                       kRaggedRows - row_end + row, row_end, kRaggedRows, part);",
           "ptx::tma_store(&out.map, slots + slot * kSlotBytes, column + slot * kSlice,\n"
           "               kRaggedRows - row_end - 1 + row, row_end + 1, kRaggedRows, part);"),
]
