// What: find, find-or-insert and insert of keys (table, id) in an open-addressing table, see
//   cupyrec/ops/hash_table.py, and moves of keys to other rows. A slot is 0, or (row + 1) << 16 |
//   (low 16 bits of the hash); the key of a row is three words: the id's low and high, the table.
// Who does what: a thread takes one key, or (insert, move) one row. Slots are probed two at a time.
//   In find-or-insert a block takes a number from a ticket and 256 keys by it; a block's first row
//   is known from the counts of those before it (decoupled look-back, Merrill and Garland 2016), so
//   that new keys get rows in the order of the batch, in one pass over it. Their keys go through
//   shared memory, so that a warp writes words side by side.
// Assumes: an even number of slots, aligned to 16 bytes, one of which stays empty; chunks aligned
//   to 8 bytes, with room for all keys; the keys of a call are distinct, so that nobody searches
//   for what is inserted meanwhile, and less than 2^31. `status` has a word a block, and
//   behind them the ticket. No row is moved twice, or to one that is moved.
// Moves: a key read 12 bytes, a row written 8; random: 32 for slots, 64 for a key found (its two
//   loads, mostly of one sector) and its chunk's address, 32 for a slot taken; 12 for a new key.
// Tried: sectors a key, 4,096 keys of which none / a tenth / half / all are new, load 0.5 at the
//   end: 3.7 / 3.8 / 3.8 / 3.7; known keys at load 0.71 and 0.8: 4.2, 4.6. Keys of 16 bytes in one
//   load: 2.8 / 2.9 / 3.3 / 3.8, but 4 bytes a key more. One slot a probe, those keys: 4.0 / 4.1 /
//   4.1 / 3.9. Search, number and insert by launches of their own: 3.2 / 3.8 / 4.7 / 5.3. Where a
//   slot was lost to another key, loading pairs up to the next empty one, or starting at either
//   slot of an empty pair by a bit of the hash: within 0.1, and more instructions.
#include "hash_key.cuh"
#include "look_back.cuh"

namespace {

constexpr uint64_t TAG = 0xFFFF;
constexpr int CHUNK_BITS = 14;  // of the rows of a chunk
constexpr int64_t MAX_ROW = int64_t(1) << 48;
constexpr int BLOCK = 256, WARPS = BLOCK / WARP;

struct Key {
    uint32_t low, high, table;

    __device__ bool is(uint32_t other_table, int64_t id) const {
        return low == static_cast<uint32_t>(id) && high == static_cast<uint32_t>(id >> 32) &&
               table == other_table;
    }
    __device__ uint64_t hash() const {
        return hash_key(table, static_cast<int64_t>(static_cast<uint64_t>(high) << 32 | low));
    }
};

__device__ __forceinline__ uint32_t* key_words(const uint64_t* chunks, int64_t row) {
    const int64_t within = row & ((1 << CHUNK_BITS) - 1);
    return reinterpret_cast<uint32_t*>(chunks[row >> CHUNK_BITS]) + 3 * within;
}

// Two words at once, which are aligned where the row is even, or from the second word on.
__device__ __forceinline__ Key load_key(const uint64_t* chunks, int64_t row) {
    const uint32_t* words = key_words(chunks, row);
    const bool odd = row & 1;
    const uint2 two = *reinterpret_cast<const uint2*>(words + odd);
    const uint32_t one = words[odd ? 0 : 2];
    return odd ? Key{one, two.x, two.y} : Key{two.x, two.y, one};
}

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
__device__ int64_t find(const uint64_t* slots, uint64_t size, const uint64_t* chunks, int64_t known,
                        uint64_t hash, uint32_t table, int64_t id) {
    uint64_t at = 2 * __umul64hi(hash, size / 2);
    while (true) {
        const ulonglong2 pair = load_pair(slots + at);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint64_t slot = i ? pair.y : pair.x;
            if (slot == 0) return -1 - static_cast<int64_t>(at + i);
            const int64_t row = static_cast<int64_t>(slot >> 16) - 1;
            if (((slot ^ hash) & TAG) == 0 && row < known && load_key(chunks, row).is(table, id)) {
                return row;
            }
        }
        at = at + 2 < size ? at + 2 : 0;
    }
}

// Put a row into slot `at`, or the first empty one behind it if others have taken that.
__device__ void take_slot(uint64_t* slots, uint64_t size, uint64_t at, uint64_t hash, int64_t row) {
    const uint64_t slot = static_cast<uint64_t>(row + 1) << 16 | (hash & TAG);
    while (atomicCAS(slots + at, uint64_t(0), slot) != 0) at = at + 1 < size ? at + 1 : 0;
}

// Number of set flags in threads of this block before this one; how many there are in the blocks
// before it, and in its own.
__device__ uint32_t number_in_order(bool flag, uint64_t* status, uint64_t stamp, int block,
                                    uint32_t* before, uint32_t* own) {
    __shared__ uint32_t counts[WARPS], others;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const unsigned flags = __ballot_sync(FULL, flag);
    if (lane == 0) counts[warp] = __popc(flags);
    __syncthreads();
    uint32_t number = __popc(flags & ((1u << lane) - 1));
    *own = 0;
    for (int w = 0; w < WARPS; ++w) {
        if (w < warp) number += counts[w];
        *own += counts[w];
    }
    if (warp == 0) {
        const uint32_t sum = sum_before(status, stamp, block, *own);
        if (lane == 0) others = sum;
    }
    __syncthreads();
    *before = others;
    return number;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(BLOCK)
    hash_find(const uint64_t* slots, uint64_t size, const uint64_t* chunks, const uint32_t* tables,
              const int64_t* ids, int64_t* rows, int64_t n) {
    const int64_t i = thread_number();
    if (i >= n) return;
    const uint64_t hash = hash_key(tables[i], ids[i]);
    const int64_t row = find(slots, size, chunks, MAX_ROW, hash, tables[i], ids[i]);
    rows[i] = row < 0 ? -1 : row;
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    hash_find_or_insert(uint64_t* slots, uint64_t size, const uint64_t* chunks,
                        const uint32_t* tables, const int64_t* ids, int64_t* rows, int64_t n,
                        int64_t first, uint64_t* status, uint64_t stamp, int64_t* total) {
    __shared__ uint32_t words[3 * BLOCK];  // of new keys
    const int block = begun_block(status + gridDim.x, stamp);
    const int64_t i = static_cast<int64_t>(block) * BLOCK + threadIdx.x;
    uint64_t hash = 0;
    uint32_t table = 0;
    int64_t id = 0, row = 0;
    if (i < n) {
        table = tables[i], id = ids[i];
        hash = hash_key(table, id);
        row = find(slots, size, chunks, first, hash, table, id);
    }
    uint32_t before, own;
    const uint32_t number = number_in_order(row < 0, status, stamp, block, &before, &own);
    first += before;
    if (row < 0) {
        const uint64_t at = static_cast<uint64_t>(-1 - row);
        row = first + number;
        words[3 * number] = static_cast<uint32_t>(id);
        words[3 * number + 1] = static_cast<uint32_t>(id >> 32);
        words[3 * number + 2] = table;
        take_slot(slots, size, at, hash, row);
    }
    if (i < n) rows[i] = row;
    if (i == n - 1) *total = before + own;
    __syncthreads();
    for (uint32_t word = threadIdx.x; word < 3 * own; word += BLOCK) {
        key_words(chunks, first + word / 3)[word % 3] = words[word];
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    hash_insert(uint64_t* slots, uint64_t size, const uint64_t* chunks, int64_t first,
                int64_t stop) {
    const int64_t row = first + thread_number();
    if (row >= stop) return;
    const uint64_t hash = load_key(chunks, row).hash();
    const int64_t empty = -1 - find(slots, size, chunks, 0, hash, 0, 0);  // loads cost less here
    take_slot(slots, size, static_cast<uint64_t>(empty), hash, row);
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    hash_move(const uint64_t* chunks, const int64_t* moved_from, const int64_t* moved_to,
              int64_t n) {
    const int64_t i = thread_number();
    if (i >= n) return;
    const Key key = load_key(chunks, moved_from[i]);
    uint32_t* words = key_words(chunks, moved_to[i]);
    words[0] = key.low, words[1] = key.high, words[2] = key.table;
}
