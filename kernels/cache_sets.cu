// What: a cache's directory by sets of 32 slots, see cupyrec/ops/cache_sets.py.
//   find: the slot of each key, or -1; what is found was used in step `now`, and counted.
//   plan: slots for new keys, and which rows have to go. `order` has the keys' numbers below bit
//     32, their sets above, ascending: the host, where such keys go next, sorts them.
//   put, mark, remove: what slots hold from now on.
// Who does what: find: a warp takes 32 keys, a lane each. All lanes look at the tags of one key
//   after the other, a lane a way, and a ballot tells the key's lane where to look. plan: the warp
//   of the first key of a set gives slots to all of them, a lane a way; a block's first evicted
//   slot is known from the counts of those before it (look_back.cuh). Else a thread takes one slot.
// Assumes: n < 2^31; records aligned to 32 bytes, tags to 64; no key and no slot comes twice.
//   `status` has a word a block, and behind them the ticket.
// Moves: find 12 n bytes read (20 n with counts), 8 n written; random: 64 for tags; for a key that
//   is there 16 read, 4 written (20 read, 8 written). plan 8 n read and written; random: a set's 64
//   of tags and 256 of counts and steps, of a row that goes 12 read and 17 written. put 36 n read,
//   34 n written at random; mark and remove 8 n read, 4 n and 6 n written at random.
// Tried: sectors a key at 100,000 sets, 10,000 keys: found 4.6, with counts 5.9; not found 2.9. The
//   count beside the id, in the same load: as many, but where two keys of a set have one tag, the
//   one's write met the other's read. A copy of the struct in place of load_key: one more, since
//   the compiler loads the words it needs one by one.
#include "hash_key.cuh"
#include "look_back.cuh"

namespace {

constexpr int WAYS = WARP, BLOCK = 256, WARPS = BLOCK / WARP;
constexpr int BATCH = 8;  // sets whose tags a warp waits for at a time
constexpr uint64_t LOW = 0xFFFFFFFFull, IN_FLIGHT = ~0ull;

struct alignas(16) Key {
    int64_t id;
    uint32_t table, dirty;
};

struct alignas(8) Use {
    uint32_t count, used;
};

// While a key's lane writes its use, others may read its key, whose tag is theirs too.
struct alignas(16) Record {
    Key key;
    Use use;
    int64_t row;
};

// In one load, which a copy of the struct, of which `dirty` is not used, would not be.
__device__ __forceinline__ Key load_key(const Record* record) {
    const ulonglong2 words = *reinterpret_cast<const ulonglong2*>(record);
    return {static_cast<int64_t>(words.x), static_cast<uint32_t>(words.y), 0};
}

struct Place {
    int64_t set;
    uint32_t tag;  // 0 where a slot is empty
};

__device__ __forceinline__ Place place_of(uint32_t table, int64_t id, uint64_t sets) {
    const uint64_t h = hash_key(table, id) * 0xD1342543DE82EF95ull;
    const uint32_t tag = static_cast<uint32_t>(h) >> 16;
    return {static_cast<int64_t>((h >> 32) * sets >> 32), tag ? tag : 1};
}

__device__ __forceinline__ uint32_t sum(uint32_t count, int64_t more) {
    const int64_t room = static_cast<int64_t>(LOW - count);
    return more >= room ? static_cast<uint32_t>(LOW) : count + static_cast<uint32_t>(more);
}

// 16 log2 of a count, rounded down: how long it is, and the four bits behind the first.
__device__ __forceinline__ int sixteenths(uint32_t count) {
    const uint32_t x = max(count, 1u);
    const int lead = __clz(x);
    return 16 * (31 - lead) + static_cast<int>(x << lead >> 27 & 15);
}

__device__ __forceinline__ uint64_t least(uint64_t x) {
    const uint32_t high = static_cast<uint32_t>(x >> 32), highest = __reduce_min_sync(FULL, high);
    const uint32_t low = high == highest ? static_cast<uint32_t>(x) : FULL;
    return static_cast<uint64_t>(highest) << 32 | __reduce_min_sync(FULL, low);
}

// Lane w is way w of a set, whose keys begin at order[p]. Gives them slots and returns which of
// these hold a row.
__device__ unsigned give_slots(const uint16_t* tags, const Record* records, const uint64_t* order,
                               uint64_t since, int64_t half_life, int64_t* slots, int64_t p,
                               int64_t n) {
    const int lane = threadIdx.x % WARP;
    const uint64_t set = order[p] >> 32;
    const uint64_t own = order[min(p + lane, n - 1)];
    const int64_t slot = static_cast<int64_t>(set) * WAYS + lane;
    const bool taken = tags[slot] != 0;
    const Use use = records[slot].use;
    const uint64_t stays = 16 * uint64_t(use.used) + half_life * sixteenths(use.count);
    uint64_t score = taken ? (1 + stays) * WAYS + lane : lane;  // the way decides ties
    if (taken && use.used >= since) score = IN_FLIGHT;
    const int keys = __popc(__ballot_sync(FULL, p + lane < n && own >> 32 == set));
    int given = 0, served = -1;  // of this way: to which key
    for (; given < keys; ++given) {
        const uint64_t next = least(score);
        if (next == IN_FLIGHT) break;
        if (next == score) served = given, score = IN_FLIGHT;
    }
    const uint64_t key = __shfl_sync(FULL, own, served < 0 ? 0 : served);
    if (served >= 0) slots[key & LOW] = slot;
    if (lane >= given && lane < keys) slots[own & LOW] = -1;
    return __ballot_sync(FULL, taken && served >= 0);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(BLOCK)
    cache_find(const uint16_t* tags, uint32_t* words, uint64_t sets, const uint32_t* tables,
               const int64_t* ids, const int64_t* counts, uint32_t now, int64_t* slots, int64_t n) {
    Record* records = reinterpret_cast<Record*>(words);
    const int64_t i = thread_number(), key = min(i, n - 1);
    const int lane = threadIdx.x % WARP;
    if (i - lane >= n) return;
    const uint32_t table = tables[key];
    const int64_t id = ids[key], more = counts ? counts[key] : 0;
    const Place own = place_of(table, id, sets);
    unsigned ways = 0;
    for (int first = 0; first < WARP; first += BATCH) {
        uint32_t found[BATCH];
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
            found[j] = tags[__shfl_sync(FULL, own.set, first + j) * WAYS + lane];
        }
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
            const uint32_t tag = __shfl_sync(FULL, own.tag, first + j);
            const unsigned alike = __ballot_sync(FULL, found[j] == tag);
            if (lane == first + j) ways = alike;
        }
    }
    if (i >= n) return;
    int64_t slot = -1;
    for (; ways; ways &= ways - 1) {
        const int64_t at = own.set * WAYS + __ffs(ways) - 1;
        const Key found = load_key(records + at);
        if (found.id == id && found.table == table) {
            if (counts) {
                records[at].use = {sum(records[at].use.count, more), now};
            } else {
                records[at].use.used = now;
            }
            slot = at;
            break;
        }
    }
    slots[i] = slot;
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    cache_plan(const uint16_t* tags, const uint32_t* words, const uint64_t* order, uint64_t since,
               int64_t half_life, int64_t* slots, int64_t* evicted, bool* dirty, int64_t* rows,
               uint64_t* status, uint64_t stamp, int64_t* total, int64_t n) {
    __shared__ uint32_t counts[WARPS], others;
    const Record* records = reinterpret_cast<const Record*>(words);
    const int block = begun_block(status + gridDim.x, stamp);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int64_t p = static_cast<int64_t>(block) * WARPS + warp;
    const uint64_t set = p < n ? order[p] >> 32 : 0;
    unsigned gone = 0;
    if (p < n && (p == 0 || order[p - 1] >> 32 != set)) {
        gone = give_slots(tags, records, order, since, half_life, slots, p, n);
    } else if (p < n && p >= WAYS && order[p - WAYS] >> 32 == set && lane == 0) {
        slots[order[p] & LOW] = -1;  // all ways of the set are given
    }
    if (lane == 0) counts[warp] = __popc(gone);
    __syncthreads();
    uint32_t before = 0, own = 0;
    for (int w = 0; w < WARPS; ++w) {
        if (w < warp) before += counts[w];
        own += counts[w];
    }
    if (warp == 0) {
        const uint32_t sum = sum_before(status, stamp, block, own);
        if (lane == 0) others = sum;
    }
    __syncthreads();
    if (p == n - 1 && lane == 0) *total = others + own;
    if (gone >> lane & 1) {
        const int64_t at = others + before + __popc(gone & ((1u << lane) - 1));
        const int64_t slot = static_cast<int64_t>(set) * WAYS + lane;
        evicted[at] = slot;
        dirty[at] = records[slot].key.dirty != 0;
        rows[at] = records[slot].row;
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    cache_put(uint16_t* tags, uint32_t* words, uint64_t sets, const int64_t* slots,
              const uint32_t* tables, const int64_t* ids, const int64_t* rows,
              const int64_t* counts, uint32_t now, int64_t n) {
    Record* records = reinterpret_cast<Record*>(words);
    const int64_t i = thread_number();
    if (i >= n) return;
    const int64_t slot = slots[i];
    if (slot < 0) return;
    tags[slot] = static_cast<uint16_t>(place_of(tables[i], ids[i], sets).tag);
    records[slot] = {{ids[i], tables[i], 0}, {sum(0, counts[i]), now}, rows[i]};
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    cache_mark(uint32_t* words, const int64_t* slots, bool dirty, int64_t n) {
    const int64_t i = thread_number();
    if (i < n && slots[i] >= 0) reinterpret_cast<Record*>(words)[slots[i]].key.dirty = dirty;
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    cache_remove(uint16_t* tags, uint32_t* words, const int64_t* slots, int64_t n) {
    const int64_t i = thread_number();
    if (i >= n || slots[i] < 0) return;
    tags[slots[i]] = 0;
    reinterpret_cast<Record*>(words)[slots[i]].key.dirty = 0;
}
