// What: key_owners: the rank that owns each key. count_owners: the same, and counts[r, t], how many
//   keys of tile t rank r owns. place_keys: from `ends`, the running sum of these counts, the keys'
//   numbers in the order of their owners, and how many keys each rank owns. See
//   cupyrec/ops/partition.py.
// Who does what: a block takes a tile; a warp HELD * 32 consecutive keys, 32 at a time. Lanes whose
//   keys have one owner find each other by a match; the first of them counts for all, count_owners
//   by an atomic in shared memory, place_keys in a line of counts of its warp, so that the order
//   within an owner stays. Then the counts of a tile's warps become where their first keys go. The
//   first block writes the ranks' counts.
// Assumes: n < 2^31, 1 <= ranks <= 1024; blocks of 256 threads; dynamic shared memory of 4 ranks
//   bytes to count, 32 ranks to place.
// Moves: owners 12 n bytes read, 4 n written; count 12 n read, 2 n and 4 ranks a tile written;
//   place 2 n and 8 ranks a tile read, 8 n written, in runs.
// Tried: 6,656 keys, 8 ranks: bytes 1.00 of the ideal for owners, 1.21 for count and place, of
// which
//   .20 are owners of 2 bytes, written and read. HELD 2, 4, 8: 27,800, 23,600, 22,600 instructions;
//   40, 40, 59 registers to place. Loads under a branch for each key: 24 KB in flight an SM, with
//   the last key instead 96. Running sums by look-back, as unique_sort does it, would need counts
//   of all ranks first. Beyond 32 ranks banks conflict where a warp's owners do, modulo 32.
#include "common.cuh"

namespace {

constexpr int WARPS = 8, HELD = 4;  // HELD: keys of a thread
constexpr int OF_WARP = HELD * WARP, TILE = WARPS * OF_WARP;

struct Keys {
    uint32_t tables[HELD];
    int64_t ids[HELD];
};

// The first of a lane's keys; the next is 32 further.
__device__ __forceinline__ int64_t first_key() {
    return int64_t(blockIdx.x) * TILE + threadIdx.x / WARP * OF_WARP + threadIdx.x % WARP;
}

// Beyond the end they are the last key: a branch for each would draw arithmetic between the loads.
__device__ __forceinline__ Keys load_keys(const uint32_t* tables, const int64_t* ids, int64_t n) {
    Keys keys;
#pragma unroll
    for (int j = 0; j < HELD; ++j) {
        const int64_t i = min(first_key() + j * WARP, n - 1);
        keys.tables[j] = tables[i];
        keys.ids[j] = ids[i];
    }
    return keys;
}

__device__ __forceinline__ int owner(uint32_t table, int64_t id, int ranks) {
    uint64_t h = static_cast<uint64_t>(id) ^ 0x5851F42D4C957F2Dull;
    h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9ull;
    h += (static_cast<uint64_t>(table) + 1) * 0x9E3779B97F4A7C15ull;
    h = (h ^ (h >> 27)) * 0x94D049BB133111EBull;
    h ^= h >> 31;
    return static_cast<int>(__umulhi(static_cast<uint32_t>(h >> 32), ranks));
}

// The lanes of this warp that have keys of the same owner; none where there is no key.
__device__ __forceinline__ unsigned lanes_alike(int owner, bool inside) {
    const unsigned all = __ballot_sync(FULL, inside);
    return inside ? __match_any_sync(all, owner) : 0;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(256)
    key_owners(const uint32_t* tables, const int64_t* ids, int ranks, int32_t* owners, int64_t n) {
    const Keys keys = load_keys(tables, ids, n);
#pragma unroll
    for (int j = 0; j < HELD; ++j) {
        const int64_t i = first_key() + j * WARP;
        if (i < n) owners[i] = owner(keys.tables[j], keys.ids[j], ranks);
    }
}

extern "C" __global__ void __launch_bounds__(256)
    count_owners(const uint32_t* tables, const int64_t* ids, int ranks, uint16_t* owners,
                 int* counts, int64_t n) {
    extern __shared__ int of_tile[];
    const Keys keys = load_keys(tables, ids, n);
    for (int r = threadIdx.x; r < ranks; r += 256) of_tile[r] = 0;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < HELD; ++j) {
        const int64_t i = first_key() + j * WARP;
        const int own = owner(keys.tables[j], keys.ids[j], ranks);
        const unsigned alike = lanes_alike(own, i < n);
        if (i < n) owners[i] = static_cast<uint16_t>(own);
        if (__ffs(alike) - 1 == threadIdx.x % WARP) atomicAdd(of_tile + own, __popc(alike));
    }
    __syncthreads();
    for (int r = threadIdx.x; r < ranks; r += 256) {
        counts[int64_t(r) * gridDim.x + blockIdx.x] = of_tile[r];
    }
}

extern "C" __global__ void __launch_bounds__(256)
    place_keys(const uint16_t* owners, int ranks, const int64_t* ends, int64_t* order,
               int64_t* counts, int64_t n) {
    extern __shared__ int of_warps[];  // [WARPS][ranks]
    const int lane = threadIdx.x % WARP;
    int* own_line = of_warps + threadIdx.x / WARP * ranks;
    int owned[HELD], before[HELD];
#pragma unroll
    for (int j = 0; j < HELD; ++j) {
        const int64_t i = first_key() + j * WARP;
        owned[j] = 0;
        if (i < n) owned[j] = owners[i];
    }
    for (int r = lane; r < ranks; r += WARP) own_line[r] = 0;
    __syncwarp();
#pragma unroll
    for (int j = 0; j < HELD; ++j) {
        const unsigned alike = lanes_alike(owned[j], first_key() + j * WARP < n);
        const unsigned lower = alike & ((1u << lane) - 1);
        before[j] = own_line[owned[j]] + __popc(lower);
        __syncwarp();
        if (alike && !lower) own_line[owned[j]] = before[j] + __popc(alike);
        __syncwarp();
    }
    __syncthreads();
    for (int r = threadIdx.x; r < ranks; r += 256) {
        const int64_t of_rank = int64_t(r) * gridDim.x, tile = of_rank + blockIdx.x;
        int to = tile > 0 ? static_cast<int>(ends[tile - 1]) : 0;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const int count = of_warps[w * ranks + r];
            of_warps[w * ranks + r] = to;
            to += count;
        }
        if (blockIdx.x == 0) {
            counts[r] = ends[of_rank + gridDim.x - 1] - (r > 0 ? ends[of_rank - 1] : 0);
        }
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < HELD; ++j) {
        const int64_t i = first_key() + j * WARP;
        if (i < n) order[own_line[owned[j]] + before[j]] = i;
    }
}
