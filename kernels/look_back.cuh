// How blocks learn in one pass what those before them count: decoupled look-back (Merrill and
// Garland 2016). Words are those of cupyrec/scratch.py: the stamp of a launch stands above bit 32,
// and a word with another stamp holds nothing.
#pragma once
#include "common.cuh"

constexpr uint64_t SUMMED = uint64_t(1) << 32;  // in a block's word: those before it are counted in

__device__ __forceinline__ bool is_of(uint64_t word, uint64_t stamp) {
    return (word ^ stamp) >> 33 == 0;
}

// How often a word was asked for its next number before; for one thread.
__device__ __forceinline__ uint32_t next_number(uint64_t* word, uint64_t stamp) {
    atomicMax(word, stamp);
    return static_cast<uint32_t>(atomicAdd(word, uint64_t(1)));
}

// A number of this block such that all with lower ones have begun, which it therefore may wait for.
__device__ __forceinline__ int begun_block(uint64_t* word, uint64_t stamp) {
    __shared__ int number;
    if (threadIdx.x == 0) number = static_cast<int>(next_number(word, stamp));
    __syncthreads();
    return number;
}

// Sum of what the blocks before `block` count; for one whole warp.
__device__ __forceinline__ uint32_t count_before(const volatile uint64_t* words, uint64_t stamp,
                                                 int block) {
    const int lane = threadIdx.x % WARP;
    uint32_t sum = 0;
    for (int last = block - 1; last >= 0; last -= WARP) {
        uint64_t word = stamp | SUMMED;  // of nothing, before the first block
        do {
            if (last - lane >= 0) word = words[last - lane];
        } while (__any_sync(FULL, !is_of(word, stamp)));
        const unsigned summed = __ballot_sync(FULL, (word & SUMMED) != 0);
        const bool counts = lane < (summed ? __ffs(summed) : WARP);
        sum += __reduce_add_sync(FULL, counts ? static_cast<uint32_t>(word) : 0u);
        if (summed) break;
    }
    return sum;
}

// Publishes what the block `own` counts and returns the sum of those before it; for one whole warp.
__device__ __forceinline__ uint32_t sum_before(volatile uint64_t* words, uint64_t stamp, int block,
                                               uint32_t own) {
    if (threadIdx.x % WARP == 0) words[block] = stamp | own;
    const uint32_t sum = count_before(words, stamp, block);
    if (threadIdx.x % WARP == 0) words[block] = stamp | SUMMED | (sum + own);
    return sum;
}
