// The instructions that simulated kernels call through the names of CUDA and of src/cuda/ptx. Each
// takes its caller's place in the program from its return address, so that a finding can name the
// line; the functions around it are inlined.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tilemoe::simulator {

// ---- CUDA's own names
void __syncthreads();
int __syncthreads_or(int predicate);
void __syncwarp(unsigned mask = 0xffffffff);
void __threadfence();
void cudaGridDependencySynchronize();
void cudaTriggerProgrammaticLaunchCompletion();

// ---- lanes of a warp: they exchange registers and order nothing
enum class Shuffle { kFrom, kXor, kUp, kDown };
// Within groups of `width` lanes, a power of two.
uint64_t shuffle(unsigned mask, uint64_t bits, Shuffle how, int by, int width);
unsigned ballot(unsigned mask, bool predicate);
unsigned match_any(unsigned mask, uint64_t bits);
// The bits of all lanes; returns the mask of the lanes that took part.
unsigned gather(unsigned mask, uint64_t bits, uint64_t (&all)[32]);

// ---- memory
void atomic_begin(void* at, size_t bytes, bool writes, bool reads);
void atomic_end();  // others may go on
uint64_t raw_load(const void* at, size_t bytes);
void raw_store(void* at, size_t bytes, uint64_t bits);
uint32_t to_shared(const void* generic);
void* dynamic_shared();
void load_shared(uint32_t shared, void* to, uint32_t bytes);
void store_shared(uint32_t shared, const void* from, uint32_t bytes);
void load_global(const void* global, void* to, uint32_t bytes);

// ---- src/cuda/ptx
void named_barrier(uint32_t barrier, uint32_t threads, bool waits);
void init_mbarrier(uint32_t barrier, uint32_t arrivals);
void arrive_mbarrier(uint32_t barrier, uint32_t bytes);
bool test_mbarrier(uint32_t barrier, uint32_t parity);
void wait_mbarrier(uint32_t barrier, uint32_t parity);
void copy_async(uint32_t shared, const void* source, uint32_t bytes);
void copy_async_4(uint32_t shared, const void* source, uint32_t bytes);
void arrive_copies(uint32_t barrier);
void fence_proxy();
void load_matrices(uint32_t (&r)[4], uint32_t shared, bool transposed);
void store_matrices(uint32_t shared, const uint32_t (&r)[4], bool transposed);
uint32_t move_matrix(uint32_t word);
void multiply_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                       bool bfloat16);
int32_t thread_number();
// `blocks`: CTAs of the cluster, one bit each; 0: this one.
void load_box_async(uint32_t shared, const void* map, uint32_t barrier, uint32_t blocks,
                    const int32_t* coordinates, int dimensions);
void store_box_async(const void* map, uint32_t shared, const int32_t* coordinates, int dimensions);
void commit_box_stores();
void wait_box_stores(int pending, bool complete);
void multiply_wgmma(bool bfloat16, int columns, float* d, uint64_t a, uint64_t b, bool accumulate,
                    bool a_mn_major, bool b_mn_major);
void multiply_wgmma_e4m3(int columns, float* d, uint64_t a, uint64_t b, bool accumulate);
void fence_wgmma();
void commit_wgmma();
void wait_wgmma(int pending);
void sync_cluster();
uint32_t address_in_cluster(uint32_t shared, uint32_t rank);
bool elect_one_lane();
// `ctas` of tcgen05: 1, or 2 for a CTA pair.
void allocate_tensor_columns(int ctas, uint32_t shared, uint32_t columns);
void relinquish_tensor_columns(int ctas);
void free_tensor_columns(int ctas, uint32_t address, uint32_t columns);
void load_tensor_columns(float* to, uint32_t pieces, uint32_t address);
void wait_tensor_loads();
void fence_tcgen05(bool after);
void multiply_tcgen05(int ctas, uint32_t d, uint64_t a, uint64_t b, uint32_t instruction,
                      bool accumulate);
// `cta_mask`: CTAs of the cluster, one bit each; 0: this one.
void commit_tcgen05(int ctas, uint32_t barrier, uint32_t cta_mask);

// ---- plant_defects.py: whether this defect of defects.inc is switched on
bool planted(int defect);

}  // namespace tilemoe::simulator
