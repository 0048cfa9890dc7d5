// Which block of several comes last, and finds what the others have written.
#pragma once
#include "common.cuh"

// In all threads of one of `blocks` blocks, the last to ask with this counter, true: it sees what
// threads of the others wrote before they asked. The counter is 0 before and after.
__device__ __forceinline__ bool last_block(uint32_t* counter, uint32_t blocks) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicInc(counter, blocks - 1) == blocks - 1;
        __threadfence();
    }
    __syncthreads();
    return last;
}
