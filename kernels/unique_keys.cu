// What: unique keys of a batch in the order of their first occurrence, see
//   cupyrec/ops/unique_keys.py.
//   claim: places[i] = the slot that i's key has in a table of this batch alone. A slot holds the
//     least i of its key, EMPTY before.
//   first: places[i] = the least i of that key; bit i % 32 of marks[i / 32] = whether that is i
//     itself; marked[word] = bits of a word. The array module sums them up.
//   number: u = marks before the key's first one; inverse[i] = u; the first of a key writes it.
//   count, scatter: a stable sort of (u, i) by u, BITS a pass from the low ones on, over the bits
//     that N keys can have. counts[digit][block] = how often a block has the digit; summed up over
//     all before, by the array module, that is where the block's first one goes. The last pass
//     writes i to positions and, since a segment begins with the first of its key, offsets.
// Who does what: claim, first: a thread takes one key. Lanes of a warp with one key send one of
//   them, so that the hot ids of a log don't line up at one address. number, count, scatter: a
//   warp has HELD * 32 consecutive keys, 32 at a time. Lane l holds the counts of digits l, l + 32,
//   ... of its warp: it takes them from a ballot for each bit of the digits, not from memory, so
//   that equal digits cost what different ones do, and no banks collide.
// Assumes: n < 2^31, more than 2 n slots, a power of two; blocks of 256 threads; 5 <= BITS <= 8;
//   shift + BITS of the last pass reach over the bits of n - 1.
// Moves: claim 12 n bytes read, 4 n written; random: 32 n for slots, 64 n for keys met, 32 U for
//   slots taken. first 4 n and 32 n random read, 4 n written. number 4 n, 12 U and 64 n random
//   read, 12 n and 12 U written; and is the first pass's count. count 4 n read (in sectors 8 n).
//   scatter 8 n read (first pass 4 n) and written, random; the last one 8 U for offsets too.
//   Besides, for 2,048 keys and pass, 2^BITS counts of 4 written and read, and as many sums.
// Tried: 6,656 keys of Zipf 1.2 in 26 tables, half of them unique, 13 bits. Bytes over the ideal,
//   fills and sums counted: 2.8. With the array module's sort of u << 32 | i, eight passes of a
//   radix sort over 64 bits, about 136 bytes a key, and with a flag of 4 bytes a key summed up in
//   place of marks: 6.4. Sectors a key: claim 3.6, first 1.3, number 1.5, scatter 1.1 and 1.4,
//   count 0.3. Digits of 8 bits instead of 7: 2.9, and a third more instructions to sort; of
//   5: 3.3. HELD 4, 8, 16: scatter has 53, 84, 107 registers, the bytes hardly differ; with 8 it
//   fills an H100 2.2 times at 1.8 million keys. Bounds for 4 blocks spill. A warp's counts in
//   shared memory, by __match_any_sync: half the instructions in number, count and scatter and 48
//   registers, but of all wavefronts 23 % are bank conflicts, and more where digits agree in their
//   bank. Taking slots by compare-and-swap at once, without the load before it: claim has 1.1
//   sectors less, but then each occurrence of a hot id is an atomic at one address, while a load
//   that finds a smaller number needs none. Each lane for itself: as many sectors and 7 % less
//   instructions, but a hot id of one table meets in a warp.
#include "hash_key.cuh"

#ifndef BITS

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
    unique_first(const int* slots, uint32_t* places, uint32_t* marks, int* marked, int64_t n) {
    const int64_t i = thread_number();
    int first = EMPTY;
    if (i < n) {
        first = slots[places[i]];
        places[i] = static_cast<uint32_t>(first);
    }
    const unsigned word = __ballot_sync(FULL, first == i);
    if (threadIdx.x % WARP == 0 && i < n) {
        marks[i / WARP] = word;
        marked[i / WARP] = __popc(word);
    }
}

#else

namespace {

constexpr int WARPS = 8, HELD = 8;  // HELD: keys of a thread
constexpr int BINS = 1 << BITS, OWNED = BINS / WARP;
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

    // Writes the counts of the block.
    __device__ __forceinline__ void write(int* to) const {
        __shared__ int of_warps[WARPS][BINS];
        share(of_warps);
        if (threadIdx.x >= BINS) return;
        int sum = 0;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += of_warps[w][threadIdx.x];
        to[int64_t(threadIdx.x) * gridDim.x + blockIdx.x] = sum;
    }
};

// The first of a lane's keys; the next is 32 further.
__device__ __forceinline__ int64_t first_key() {
    return thread_number() / WARP * (WARP * HELD) + threadIdx.x % WARP;
}

__device__ __forceinline__ uint32_t digit_of(uint32_t number, int shift) {
    return (number & ~FIRST) >> shift & (BINS - 1);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(256)
    unique_number(const uint32_t* tables, const int64_t* ids, const uint32_t* places,
                  const uint32_t* marks, const int* sums, uint32_t* unique_tables,
                  int64_t* unique_ids, int64_t* inverse, uint32_t* numbers, int* counts,
                  int64_t n) {
    const int64_t start = first_key();
    uint32_t firsts[HELD], us[HELD];
#pragma unroll
    for (int j = 0; j < HELD; ++j) {
        firsts[j] = 0;
        if (start + j * WARP < n) firsts[j] = places[start + j * WARP];
    }
#pragma unroll
    for (int j = 0; j < HELD; ++j) {
        const uint32_t word = firsts[j] / WARP;
        us[j] = sums[word] - __popc(marks[word] >> firsts[j] % WARP);
    }
    Digits digits;
#pragma unroll
    for (int j = 0; j < HELD; ++j) {
        const int64_t i = start + j * WARP;
        const uint32_t u = us[j];
        if (i < n) {
            inverse[i] = u;
            numbers[i] = firsts[j] == i ? u | FIRST : u;
            if (firsts[j] == i) {
                unique_tables[u] = tables[i];
                unique_ids[u] = ids[i];
            }
        }
        digits.take(digit_of(u, 0), i < n);
    }
    digits.write(counts);
}

extern "C" __global__ void __launch_bounds__(256)
    unique_count(const uint64_t* pairs, int* counts, int shift, int64_t n) {
    const int64_t start = first_key();
    uint32_t numbers[HELD];
#pragma unroll
    for (int j = 0; j < HELD; ++j) {
        numbers[j] = 0;
        if (start + j * WARP < n) numbers[j] = static_cast<uint32_t>(pairs[start + j * WARP]);
    }
    Digits digits;
#pragma unroll
    for (int j = 0; j < HELD; ++j) digits.take(digit_of(numbers[j], shift), start + j * WARP < n);
    digits.write(counts);
}

// From numbers (the first pass) or pairs, of which the low half is the number, the high one i; to
// positions and offsets (the last pass) or sorted pairs.
extern "C" __global__ void __launch_bounds__(256)
    unique_scatter(const uint32_t* numbers, const uint64_t* pairs, const int* sums,
                   uint64_t* sorted, int64_t* positions, int64_t* offsets, int shift, int64_t n) {
    __shared__ int of_warps[WARPS][BINS];
    const int64_t start = first_key();
    uint64_t held[HELD];
#pragma unroll
    for (int j = 0; j < HELD; ++j) {
        const int64_t i = start + j * WARP;
        held[j] = 0;
        if (i < n) held[j] = numbers ? static_cast<uint64_t>(i) << 32 | numbers[i] : pairs[i];
    }
    int to = 0;  // where the block's first key of digit threadIdx.x goes
    const int64_t at = int64_t(threadIdx.x) * gridDim.x + blockIdx.x;
    if (threadIdx.x < BINS && at > 0) to = sums[at - 1];
    Digits digits;
    int ranks[HELD];
#pragma unroll
    for (int j = 0; j < HELD; ++j) {
        const uint32_t number = static_cast<uint32_t>(held[j]);
        ranks[j] = digits.take(digit_of(number, shift), start + j * WARP < n);
    }
    digits.share(of_warps);
    if (threadIdx.x < BINS) {
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
#pragma unroll
    for (int j = 0; j < HELD; ++j) {
        const uint32_t number = static_cast<uint32_t>(held[j]);
        const int64_t place = Digits::of(bases, digit_of(number, shift)) + ranks[j];
        if (start + j * WARP >= n) continue;
        if (sorted) {
            sorted[place] = held[j];
            continue;
        }
        const int64_t u = number & ~FIRST;
        positions[place] = static_cast<int64_t>(held[j] >> 32);
        if (number & FIRST) offsets[u] = place;
        if (place == n - 1) offsets[u + 1] = n;
    }
}

#endif
