// What: unique keys of a batch in the order of their first occurrence, see
//   cupyrec/ops/unique_keys.py. Three launches; sums and a sort of the array module between them.
//   claim: places[i] = the slot that i's key has in a table of this batch alone. A slot holds the
//     least i of its key, EMPTY before.
//   first: places[i] = the least i of that key; flags[i] = whether that is i itself.
//   number: u = (flags up to the key's first, summed) - 1; inverse[i] = u; the first of a key
//   writes
//     it; sortable[i] = u << 32 | i.
//   segments: of the sorted ones, positions and where each key starts.
// Who does what: a thread takes one key. Lanes of a warp with one key send one of them, so that
//   the hot ids of a log don't line up at one address.
// Assumes: n < 2^31, more than 2 n slots, a power of two; blocks of 256 threads.
// Moves: claim 12 n bytes read, 4 n written; random: 32 n for slots, 64 n for keys met, 32 U for
//   slots taken. first 4 n and 32 n random read, 8 n written. number 8 n and 32 n random read, 16 n
//   and 12 U written. segments 8 n read, 8 (n + U) written.
// Tried: sectors a key, 7,000 keys of Zipf 1.2 in 26 tables, half of them unique: claim 3.7, first
//   1.4, number 1.8, segments 0.9. Taking slots by compare-and-swap at once, without the load
//   before it: claim 2.6, but then each occurrence of a hot id is an atomic at one address, while
//   a load that finds a smaller number needs none. Each lane for itself: as many sectors and 7 %
//   less instructions, but a hot id of one table meets in a warp.
#include "hash_key.cuh"

namespace {

constexpr int EMPTY = 0x7FFFFFFF;

// The slot of key number i, where the least number of that key ends up.
__device__ uint32_t claim(const uint32_t* tables, const int64_t* ids, int* slots, uint32_t mask,
                          uint32_t table, int64_t id, uint64_t hash, int i) {
    for (uint32_t at = static_cast<uint32_t>(hash) & mask;; at = (at + 1) & mask) {
        int other = *static_cast<volatile int*>(slots + at);
        if (other == EMPTY) {
            other = atomicCAS(slots + at, EMPTY, i);
            if (other == EMPTY) return at;
        }
        if (ids[other] == id && tables[other] == table) {
            if (i < other) atomicMin(slots + at, i);
            return at;
        }
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(256)
    unique_claim(const uint32_t* tables, const int64_t* ids, int* slots, uint32_t mask,
                 uint32_t* places, int64_t n) {
    const int64_t i = thread_number();
    const int lane = threadIdx.x % WARP;
    uint32_t table = 0;
    int64_t id = 0;
    if (i < n) table = tables[i], id = ids[i];
    const uint64_t hash = hash_key(table, id);
    const unsigned inside = __ballot_sync(FULL, i < n);
    const unsigned alike = __match_any_sync(FULL, static_cast<uint32_t>(hash)) & inside;
    const int leader = i < n ? __ffs(alike) - 1 : lane;  // the lane of the least i
    const bool same = __shfl_sync(FULL, table, leader) == table;
    const bool follows = __shfl_sync(FULL, id, leader) == id && same && leader != lane;
    uint32_t at = 0;
    if (i < n && !follows) {
        at = claim(tables, ids, slots, mask, table, id, hash, static_cast<int>(i));
    }
    const uint32_t leaders = __shfl_sync(FULL, at, leader);
    if (i < n) places[i] = follows ? leaders : at;
}

extern "C" __global__ void __launch_bounds__(256)
    unique_first(const int* slots, uint32_t* places, int* flags, int64_t n) {
    const int64_t i = thread_number();
    if (i >= n) return;
    const int first = slots[places[i]];
    places[i] = static_cast<uint32_t>(first);
    flags[i] = first == i;
}

extern "C" __global__ void __launch_bounds__(256)
    unique_number(const uint32_t* tables, const int64_t* ids, const uint32_t* places,
                  const int* sums, uint32_t* unique_tables, int64_t* unique_ids, int64_t* inverse,
                  uint64_t* sortable, int64_t n) {
    const int64_t i = thread_number();
    if (i >= n) return;
    const int64_t first = places[i];
    const int u = sums[first] - 1;
    inverse[i] = u;
    sortable[i] = static_cast<uint64_t>(u) << 32 | static_cast<uint64_t>(i);
    if (first == i) {
        unique_tables[u] = tables[i];
        unique_ids[u] = ids[i];
    }
}

extern "C" __global__ void __launch_bounds__(256)
    unique_segments(const uint64_t* sorted, int64_t* offsets, int64_t* positions, int64_t n) {
    const int64_t i = thread_number();
    if (i >= n) return;
    const uint64_t here = sorted[i];
    positions[i] = static_cast<int64_t>(here & 0xFFFFFFFFu);
    const int64_t u = static_cast<int64_t>(here >> 32);
    if (i == 0 || static_cast<int64_t>(sorted[i - 1] >> 32) != u) offsets[u] = i;
    if (i == n - 1) offsets[u + 1] = n;
}
