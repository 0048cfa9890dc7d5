// What: unique keys of a batch in the order of their first occurrence, see
//   cupyrec/ops/unique_keys.py.
//   claim: places[i] = the slot that i's key has in a table of this batch alone. A slot holds the
//     least i of its key, as ~i below the stamp of the launch, so that it is the largest word.
//   number: u = firsts before the key's first one; inverse[i] = u; the first of a key writes it.
//     Tiles are numbered in one pass, see look_back.cuh. marks[i / 32] = bit i % 32 tells whether i
//     is a first, the high word how many are before: 0 until its tile knows, so others wait for it.
//   sort: a stable sort of (u, i) by u, BITS a pass from the low ones on. bins[digit] = how often a
//     digit comes in all: number counts the first digit, each pass the next one. How often it comes
//     in the tiles before is looked back for, digit by digit (Adinets and Merrill 2022). The last
//     pass writes i to positions and, since a segment begins with the first of its key, offsets.
// Who does what: claim: a thread takes one key. Lanes of a warp with one key send one of them, so
//   that the hot ids of a log don't line up at one address. number, sort: a block takes a tile by a
//   ticket, so that it waits for blocks alone that have begun. A warp has HELD * 32 consecutive
//   keys, 32 at a time. Lane l holds the counts of digits l, l + 32, ... of its warp: it takes them
//   from a ballot for each bit of the digits, not from memory, so that equal digits cost what
//   different ones do, and no banks collide.
// Assumes: n < 2^31, more than 2 n slots, a power of two; blocks of 256 threads; 5 <= BITS <= 8;
//   slots and status hold older stamps; claim clears marks and bins; shift + BITS of the last pass
//   reach over the bits of U - 1.
// Moves: claim 12 n bytes read, 4 n written; random: 32 n for slots, 64 n for keys met, 32 U for
//   slots taken. number 4 n, 12 U and 64 n random read, 12 n and 12 U written. sort 8 n read (first
//   pass 4 n) and written, random; the last one 8 U for offsets too. Besides, for 2,048 keys and
//   pass, 2^BITS words of 8 written, and those of four tiles or more read.
// Tried: 6,656 keys of Zipf 1.2 in 26 tables, half of them unique, 13 bits. Bytes over the ideal:
//   2.3, in 4 launches. Slots filled before, and marks and digits summed up by the array module:
//   2.8, in 10. With the array module's sort of u << 32 | i, eight passes of a radix sort over 64
//   bits: 6.4. Sectors a key: claim 3.7, number 2.4, sort 1.1 and 1.4. Digits of 8 bits instead of
//   7: a third more instructions to sort. HELD 4, 8, 16: sort had 53, 84, 107 registers, the bytes
//   hardly differ; with 8 it fills an H100 2.2 times at 1.8 million keys. Bounds for 4 blocks
//   spill, and so does keeping marks until they are written. A warp's counts in shared memory, by
//   __match_any_sync: half the instructions in number and sort and 48 registers, but of all
//   wavefronts 23 % are bank conflicts, and more where digits agree in their bank. Taking slots by
//   compare-and-swap at once, without the load before it: claim has 1.1 sectors less, but then each
//   occurrence of a hot id is an atomic at one address, while a load that finds a smaller number
//   needs none. Each lane for itself: as many sectors and 7 % less instructions, but a hot id of
//   one table meets in a warp.
#include "hash_key.cuh"
#include "look_back.cuh"

#ifndef BITS

namespace {

// The slot of key number i, where the least number of that key ends up.
__device__ uint32_t claim(const uint32_t* tables, const int64_t* ids, uint64_t* slots,
                          uint64_t stamp, uint32_t mask, uint32_t table, int64_t id, uint64_t hash,
                          uint32_t i) {
    const uint64_t own = stamp | ~i;
    for (uint32_t at = static_cast<uint32_t>(hash) & mask;; at = (at + 1) & mask) {
        uint64_t other = *static_cast<volatile uint64_t*>(slots + at);
        if (!is_of(other, stamp)) {
            const uint64_t found = atomicCAS(slots + at, other, own);
            if (found == other) return at;
            other = found;  // of another key of this launch
        }
        const uint32_t met = ~static_cast<uint32_t>(other);
        if (ids[met] == id && tables[met] == table) {
            if (own > other) atomicMax(slots + at, own);
            return at;
        }
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(256)
    unique_claim(const uint32_t* tables, const int64_t* ids, uint64_t* slots, uint64_t stamp,
                 uint32_t mask, uint32_t* places, uint64_t* cleared, int64_t words, int64_t n) {
    const int64_t i = thread_number();
    const int lane = threadIdx.x % WARP;
    for (int64_t word = i; word < words; word += int64_t(gridDim.x) * 256) cleared[word] = 0;
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
        at = claim(tables, ids, slots, stamp, mask, table, id, hash, static_cast<uint32_t>(i));
    }
    const uint32_t leaders = __shfl_sync(FULL, at, leader);
    if (i < n) places[i] = follows ? leaders : at;
}

#else

namespace {

constexpr int WARPS = 8, HELD = 8;  // HELD: keys of a thread
constexpr int OF_WARP = HELD * WARP, TILE = WARPS * OF_WARP;
constexpr int BINS = 1 << BITS, OWNED = BINS / WARP;
constexpr int AHEAD = 4;                 // tiles that look-back asks for at a time
constexpr uint32_t FIRST = 0x80000000u;  // with a u: this is the first of its key

// How often a warp has met each digit: counts[q] of lane l is of digit q * 32 + l.
struct Digits {
    int counts[OWNED] = {};

    // The value that the owner of `digit` has among `held`, which are ordered like counts.
    static __device__ __forceinline__ int of(const int (&held)[OWNED], uint32_t digit) {
        int found = 0;
#pragma unroll
        for (int q = 0; q < OWNED; ++q) {
            const int other = __shfl_sync(FULL, held[q], digit % WARP);
            if (digit / WARP == q) found = other;
        }
        return found;
    }

    // Counts the digits of a warp's lanes that are `there`; returns how often this lane's was met
    // before, lower lanes included.
    __device__ __forceinline__ int take(uint32_t digit, bool there) {
        const uint32_t lane = threadIdx.x % WARP;
        unsigned alike = __ballot_sync(FULL, there), owned = alike, high[BITS];
#pragma unroll
        for (int b = 0; b < BITS; ++b) {
            const unsigned set = __ballot_sync(FULL, digit >> b & 1);
            alike &= digit >> b & 1 ? set : ~set;
            if (b < 5) owned &= lane >> b & 1 ? set : ~set;
            high[b] = set;
        }
        const int before = of(counts, digit) + __popc(alike & ((1u << lane) - 1));
#pragma unroll
        for (int q = 0; q < OWNED; ++q) {
            unsigned met = owned;
#pragma unroll
            for (int b = 5; b < BITS; ++b) met &= q >> (b - 5) & 1 ? high[b] : ~high[b];
            counts[q] += __popc(met);
        }
        return before;
    }

    // Hands the counts of all warps to the block.
    __device__ __forceinline__ void share(int (*of_warps)[BINS]) const {
#pragma unroll
        for (int q = 0; q < OWNED; ++q) {
            of_warps[threadIdx.x / WARP][q * WARP + threadIdx.x % WARP] = counts[q];
        }
        __syncthreads();
    }

    // Adds the counts of the block to those of all.
    __device__ __forceinline__ void add_to(int* bins) const {
        __shared__ int of_warps[WARPS][BINS];
        share(of_warps);
        if (threadIdx.x >= BINS) return;
        int sum = 0;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += of_warps[w][threadIdx.x];
        if (sum) atomicAdd(bins + threadIdx.x, sum);
    }
};

// The first of a lane's keys in a tile; the next is 32 further.
__device__ __forceinline__ int64_t first_key(int tile) {
    return int64_t(tile) * TILE + threadIdx.x / WARP * OF_WARP + threadIdx.x % WARP;
}

__device__ __forceinline__ uint32_t digit_of(uint32_t number, int shift) {
    return (number & ~FIRST) >> shift & (BINS - 1);
}

// Sum of one digit's counts in the tiles before; a tile's words are BINS.
__device__ __forceinline__ int digits_before(const volatile uint64_t* words, uint64_t stamp,
                                             int tile) {
    int sum = 0;
    for (int last = tile - 1; last >= 0; last -= AHEAD) {
        uint64_t found[AHEAD];
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            found[a] = stamp | SUMMED;  // of nothing, before the first tile
            if (last >= a) found[a] = words[int64_t(last - a) * BINS];
        }
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            while (!is_of(found[a], stamp)) found[a] = words[int64_t(last - a) * BINS];
            sum += static_cast<int>(found[a]);
            if (found[a] & SUMMED) return sum;
        }
    }
    return sum;
}

// Sum of x over the threads before this one; for a whole block.
__device__ __forceinline__ int sum_of_threads_before(int x) {
    __shared__ int of_warps[WARPS];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int sum = x;
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) {
        const int other = __shfl_up_sync(FULL, sum, step);
        if (lane >= step) sum += other;
    }
    if (lane == WARP - 1) of_warps[warp] = sum;
    __syncthreads();
    for (int w = 0; w < warp; ++w) sum += of_warps[w];
    return sum - x;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(256)
    unique_number(const uint32_t* tables, const int64_t* ids, const uint32_t* places,
                  const uint64_t* slots, uint64_t* status, uint64_t stamp, uint64_t* marks,
                  uint32_t* unique_tables, int64_t* unique_ids, int64_t* inverse, uint32_t* numbers,
                  int* bins, int64_t* total, int64_t n) {
    __shared__ uint32_t of_warps[WARPS], others;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int tile = begun_block(status + gridDim.x, stamp);
    const int64_t start = first_key(tile);
    uint32_t firsts[HELD];
#pragma unroll
    for (int j = 0; j < HELD; ++j) {
        firsts[j] = 0;
        if (start + j * WARP < n) firsts[j] = places[start + j * WARP];
    }
#pragma unroll
    for (int j = 0; j < HELD; ++j) {
        if (start + j * WARP < n) firsts[j] = ~static_cast<uint32_t>(slots[firsts[j]]);
    }
    uint32_t own = 0;
    uint64_t mark = 0;  // lane j: bits of the j-th 32 keys, and the number of firsts before them
#pragma unroll
    for (int j = 0; j < HELD; ++j) {
        const int64_t i = start + j * WARP;
        const unsigned bits = __ballot_sync(FULL, i < n && firsts[j] == i);
        if (lane == j) mark = static_cast<uint64_t>(own) << 32 | bits;
        own += __popc(bits);
    }
    if (lane == 0) of_warps[warp] = own;
    __syncthreads();
    uint32_t before = 0, of_tile = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        if (w < warp) before += of_warps[w];
        of_tile += of_warps[w];
    }
    if (warp == 0) {
        const uint32_t sum = sum_before(status, stamp, tile, of_tile);
        if (lane == 0) others = sum;
        if (lane == 0 && tile == gridDim.x - 1) *total = sum + of_tile;
    }
    __syncthreads();
    volatile uint64_t* found = marks;  // 0 until it is written: the first key is the first of its
    if (lane < HELD && start - lane + lane * WARP < n) {
        found[(start - lane) / WARP + lane] = mark + (static_cast<uint64_t>(others + before) << 32);
    }
    uint64_t words[HELD];
#pragma unroll
    for (int j = 0; j < HELD; ++j) {
        words[j] = 0;
        if (start + j * WARP < n) words[j] = found[firsts[j] / WARP];
    }
    uint32_t us[HELD];
#pragma unroll
    for (int j = 0; j < HELD; ++j) {
        const int64_t i = start + j * WARP;
        while (i < n && words[j] == 0) words[j] = found[firsts[j] / WARP];
        const uint32_t lower = static_cast<uint32_t>(words[j]) & ((1u << firsts[j] % WARP) - 1);
        us[j] = static_cast<uint32_t>(words[j] >> 32) + __popc(lower);
        if (firsts[j] == i) us[j] |= FIRST;
    }
    __syncwarp();
    Digits digits;
#pragma unroll
    for (int j = 0; j < HELD; ++j) {
        const int64_t i = start + j * WARP;
        const uint32_t u = us[j] & ~FIRST;
        if (i < n) {
            inverse[i] = u;
            numbers[i] = us[j];
            if (us[j] & FIRST) {
                unique_tables[u] = tables[i];
                unique_ids[u] = ids[i];
            }
        }
        digits.take(digit_of(u, 0), i < n);
    }
    digits.add_to(bins);
}

// From numbers (the first pass) or pairs, of which the low half is the number, the high one i; to
// positions and offsets (the last pass) or sorted pairs, whose next digit is counted.
extern "C" __global__ void __launch_bounds__(256)
    unique_sort(const uint32_t* numbers, const uint64_t* pairs, const int* bins, int* next_bins,
                uint64_t* status, uint64_t stamp, uint64_t* sorted, int64_t* positions,
                int64_t* offsets, int shift, int64_t n) {
    __shared__ int of_warps[WARPS][BINS];
    const int tile = begun_block(status + int64_t(gridDim.x) * BINS, stamp);
    const int64_t start = first_key(tile);
    uint64_t held[HELD];
#pragma unroll
    for (int j = 0; j < HELD; ++j) {
        const int64_t i = start + j * WARP;
        held[j] = 0;
        if (i < n) held[j] = numbers ? static_cast<uint64_t>(i) << 32 | numbers[i] : pairs[i];
    }
    // Where the first key of digit threadIdx.x goes, of all keys, then of this tile's.
    int to = sum_of_threads_before(threadIdx.x < BINS ? bins[threadIdx.x] : 0);
    Digits digits;
    int ranks[HELD];
#pragma unroll
    for (int j = 0; j < HELD; ++j) {
        const uint32_t number = static_cast<uint32_t>(held[j]);
        ranks[j] = digits.take(digit_of(number, shift), start + j * WARP < n);
    }
    digits.share(of_warps);
    if (threadIdx.x < BINS) {
        int own = 0;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) own += of_warps[w][threadIdx.x];
        volatile uint64_t* words = status + threadIdx.x;
        words[int64_t(tile) * BINS] = stamp | own;
        const int before = digits_before(words, stamp, tile);
        words[int64_t(tile) * BINS] = stamp | SUMMED | (before + own);
        to += before;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const int count = of_warps[w][threadIdx.x];
            of_warps[w][threadIdx.x] = to;
            to += count;
        }
    }
    __syncthreads();
    int bases[OWNED];
#pragma unroll
    for (int q = 0; q < OWNED; ++q) {
        bases[q] = of_warps[threadIdx.x / WARP][q * WARP + threadIdx.x % WARP];
    }
    Digits next;
#pragma unroll
    for (int j = 0; j < HELD; ++j) {
        const uint32_t number = static_cast<uint32_t>(held[j]);
        const int64_t place = Digits::of(bases, digit_of(number, shift)) + ranks[j];
        const bool inside = start + j * WARP < n;
        if (sorted) {
            if (inside) sorted[place] = held[j];
            next.take(digit_of(number, shift + BITS), inside);
            continue;
        }
        if (!inside) continue;
        const int64_t u = number & ~FIRST;
        positions[place] = static_cast<int64_t>(held[j] >> 32);
        if (number & FIRST) offsets[u] = place;
        if (place == n - 1) offsets[u + 1] = n;
    }
    if (sorted) next.add_to(next_bins);
}

#endif
