// What: find, find-or-insert and insert of keys (table, id) in an open-addressing table, see
//   cupyrec/ops/hash_table.py. A slot is 0, or (16 bits of the hash) << 48 | (row + 1); keys[row]
//   is (id, table).
// Who does what: a thread takes one key, or (insert) one row. Slots are probed two at a time. In
//   find-or-insert a block takes a number from a ticket and 256 keys by it; a block's first row is
//   known from the counts of those before it (decoupled look-back, Merrill and Garland 2016), so
//   that new keys get rows in the order of the batch, in one pass over it.
// Assumes: a power of two >= 2 of slots, aligned to 16 bytes, one of which stays empty; the keys
//   of a call are distinct, so that nobody searches for what is inserted meanwhile, and less than
//   2^31; keys[row] has room for all. `status` is zero: a word a block, and behind them the ticket.
// Moves: a key read 12 bytes, a row written 8; random: 32 for slots, 32 for a key found, 32 for a
//   slot taken; 16 for a new key, side by side.
// Tried: sectors a key, 4,096 keys of which none / a tenth / half / all are new, load 0.5 at the
//   end: 2.8 / 2.9 / 3.3 / 3.8. One slot a probe: 4.0 / 4.1 / 4.1 / 3.9. Search, number and insert
//   by launches of their own: 3.2 / 3.8 / 4.7 / 5.3. Tables and ids as two arrays: 3.8 for known
//   keys. Where a slot was lost to another key, loading pairs up to the next empty one, or starting
//   at either slot of an empty pair by a bit of the hash: within 0.1, and more instructions.
#include "hash_key.cuh"

namespace {

constexpr uint64_t ROW = (uint64_t(1) << 48) - 1;
constexpr uint64_t COUNTED = uint64_t(1) << 62;  // a block's own new keys are known
constexpr uint64_t SUMMED = uint64_t(2) << 62;   // and those of all before it
constexpr int BLOCK = 256, WARPS = BLOCK / WARP;

// Others may fill slots meanwhile.
__device__ __forceinline__ ulonglong2 load_pair(const uint64_t* slots) {
    ulonglong2 pair;
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(pair.x), "=l"(pair.y)
                 : "l"(slots)
                 : "memory");
    return pair;
}

// Row of the key, or -1 - (an empty slot where its search ends). Rows from `known` on are others'.
__device__ int64_t find(const uint64_t* slots, uint64_t mask, const longlong2* keys, int64_t known,
                        uint64_t hash, uint32_t table, int64_t id) {
    for (uint64_t at = hash & mask & ~uint64_t(1);; at = (at + 2) & mask) {
        const ulonglong2 pair = load_pair(slots + at);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint64_t slot = i ? pair.y : pair.x;
            if (slot == 0) return -1 - static_cast<int64_t>(at + i);
            const int64_t row = static_cast<int64_t>(slot & ROW) - 1;
            if ((slot ^ hash) >> 48 == 0 && row < known) {
                const longlong2 key = keys[row];
                if (key.x == id && key.y == table) return row;
            }
        }
    }
}

// Put a row into slot `at`, or the first empty one behind it if others have taken that.
__device__ void take_slot(uint64_t* slots, uint64_t mask, uint64_t at, uint64_t hash, int64_t row) {
    const uint64_t slot = (hash & ~ROW) | static_cast<uint64_t>(row + 1);
    while (atomicCAS(slots + at, uint64_t(0), slot) != 0) at = (at + 1) & mask;
}

// Sum of what the blocks before `block` count; for one whole warp.
__device__ uint32_t count_before(const volatile uint64_t* status, int block, int lane) {
    uint32_t sum = 0;
    for (int last = block - 1; last >= 0; last -= WARP) {
        uint64_t state = SUMMED;  // of no keys, before the first block
        do {
            if (last - lane >= 0) state = status[last - lane];
        } while (__any_sync(FULL, state == 0));
        const unsigned summed = __ballot_sync(FULL, state >= SUMMED);
        const bool counts = lane < (summed ? __ffs(summed) : WARP);
        sum += __reduce_add_sync(FULL, counts ? static_cast<uint32_t>(state) : 0u);
        if (summed) break;
    }
    return sum;
}

// Number of set flags in threads before this one, `first` of the grid's order included. `total`
// becomes the number up to this block's end.
__device__ uint32_t number_in_order(bool flag, volatile uint64_t* status, int block,
                                    uint32_t* total) {
    __shared__ uint32_t counts[WARPS], before;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const unsigned flags = __ballot_sync(FULL, flag);
    if (lane == 0) counts[warp] = __popc(flags);
    __syncthreads();
    uint32_t number = __popc(flags & ((1u << lane) - 1)), own = 0;
    for (int w = 0; w < WARPS; ++w) {
        if (w < warp) number += counts[w];
        own += counts[w];
    }
    if (warp == 0) {
        if (lane == 0) status[block] = COUNTED | own;
        const uint32_t sum = count_before(status, block, lane);
        if (lane == 0) {
            status[block] = SUMMED | (sum + own);
            before = sum;
        }
    }
    __syncthreads();
    *total = before + own;
    return before + number;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(BLOCK)
    hash_find(const uint64_t* slots, uint64_t mask, const int64_t* keys, const uint32_t* tables,
              const int64_t* ids, int64_t* rows, int64_t n) {
    const int64_t i = thread_number();
    if (i >= n) return;
    const longlong2* known = reinterpret_cast<const longlong2*>(keys);
    const uint64_t hash = hash_key(tables[i], ids[i]);
    const int64_t row = find(slots, mask, known, ROW, hash, tables[i], ids[i]);
    rows[i] = row < 0 ? -1 : row;
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    hash_find_or_insert(uint64_t* slots, uint64_t mask, int64_t* keys, const uint32_t* tables,
                        const int64_t* ids, int64_t* rows, int64_t n, int64_t first,
                        uint64_t* status, int64_t* total) {
    __shared__ int block;
    if (threadIdx.x == 0) block = static_cast<int>(atomicAdd(status + gridDim.x, uint64_t(1)));
    __syncthreads();
    const int64_t i = static_cast<int64_t>(block) * BLOCK + threadIdx.x;
    longlong2* known = reinterpret_cast<longlong2*>(keys);
    uint64_t hash = 0;
    uint32_t table = 0;
    int64_t id = 0, row = 0;
    if (i < n) {
        table = tables[i], id = ids[i];
        hash = hash_key(table, id);
        row = find(slots, mask, known, first, hash, table, id);
    }
    uint32_t up_to_here;
    const uint32_t number = number_in_order(row < 0, status, block, &up_to_here);
    if (row < 0) {
        const uint64_t at = static_cast<uint64_t>(-1 - row);
        row = first + number;
        known[row] = make_longlong2(id, table);
        take_slot(slots, mask, at, hash, row);
    }
    if (i < n) rows[i] = row;
    if (i == n - 1) *total = up_to_here;
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    hash_insert(uint64_t* slots, uint64_t mask, const int64_t* keys, int64_t first, int64_t stop) {
    const int64_t row = first + thread_number();
    if (row >= stop) return;
    const longlong2 key = reinterpret_cast<const longlong2*>(keys)[row];
    const uint64_t hash = hash_key(static_cast<uint32_t>(key.y), key.x);
    const int64_t empty = -1 - find(slots, mask, nullptr, 0, hash, 0, 0);  // loads cost less here
    take_slot(slots, mask, static_cast<uint64_t>(empty), hash, row);
}
