// What: out[u] = sum over p in offsets[u] .. offsets[u + 1] - 1 of x[i], i = positions[p]; if
//   INDEXED of x[index[i]], if WEIGHTED times weights[i]. By a tree over chunks of 32 rows: a chunk
//   adds up each run of rows of one segment in it. The sum of a run goes to its out[u]; but if the
//   segment began in an earlier chunk, it is this chunk's head, kept in `heads` with the segment in
//   `owners` (-1: no head). Heads are the rows of the next level, where runs are added to out[u] or
//   are heads again, until there is one chunk. So each sum has one order, and no lane has more to
//   do where a segment is long.
// Who does what: LANES lanes have a chunk, each VECTOR columns of it, LANES * VECTOR at a time.
//   segment_sum: a block of 8 warps; warp 0 looks for the segment of the block's first row by a
//   search in 32 parts, flags in shared memory tell where others begin. combine_heads: a block of
//   one warp; a run begins where the owner is another.
// Assumes: offsets ascend strictly from 0 to n; VECTOR divides DIM, x, heads and out are aligned
//   to VECTOR floats; LANES is a power of two from 4 to 32.
// Moves: x, positions, index, weights, offsets read once, out written; N / 32 heads and owners
//   written, read where there is one, and then out[u] read and written again.
// Tried: 6,912 rows of DIM 128, Zipf 1.2: 3 launches, bytes 1.05 of the ideal, sectors 1.12, the
//   longest warp 1.3 of the mean. BATCH 4, 8, 16, 32: 1,480, 1,287, 1,209, 1,168 instructions a
//   warp but 39, 62, 88, 150 registers on sm_90; 8 have most bytes in flight, 128 KB an SM.
//   combine_heads in blocks of 8 warps: most have no chunk, the longest warp is 5.2 of the mean.
//   `rows` without its column of padding: DIM 16 has 60 % bank conflicts instead of 0.2 %. With
//   weights, each vector multiplied where it is loaded: 16 KB an SM in flight instead of 128.
#include "common.cuh"

constexpr int ROWS = 32;               // of a chunk: a bit each in a word
constexpr int CHUNKS = 256 / LANES;    // of a block of segment_sum
constexpr int OF_WARP = WARP / LANES;  // chunks of a warp
constexpr int BATCH = 8;               // loads of a lane in flight

namespace {

// What the lanes of a chunk know of it.
struct Chunk {
    const int64_t* rows;   // where each lies in x; of heads: its segment
    const float* weights;  // of each, if WEIGHTED
    unsigned starts;       // bit j: a run begins in row j; without bit 0 the first run is the head
    int count;             // rows that are there
    int64_t first;         // number of the first row
    int64_t segment;       // of the first row
};

// Writes the sum of a run.
template <bool HEADS>
__device__ __forceinline__ void finish(Floats<VECTOR> sum, float* to) {
    if (HEADS) {
        const Floats<VECTOR> before = load<VECTOR>(to);
#pragma unroll
        for (int l = 0; l < VECTOR; ++l) sum.at[l] += before.at[l];
    }
    store(to, sum);
}

template <bool HEADS>
__device__ __forceinline__ void add_up(const Chunk& chunk, const float* x, float* head,
                                       float* out) {
    if (chunk.count <= 0) return;
    for (int column = threadIdx.x % LANES * VECTOR; column < DIM; column += LANES * VECTOR) {
        Floats<VECTOR> sum = {};
        int64_t segment = chunk.segment;
        bool is_head = !(chunk.starts & 1);
        for (int j = 0; j < ROWS; j += BATCH) {
            Floats<VECTOR> values[BATCH];
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                const int64_t row = j + b < chunk.count ? chunk.rows[j + b] : -1;
                const int64_t i = HEADS && row >= 0 ? chunk.first + j + b : row;
                values[b] = {};
                if (i >= 0) values[b] = load<VECTOR>(x + i * DIM + column);
            }
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                if (j + b >= chunk.count) continue;
                if (WEIGHTED && !HEADS) {
#pragma unroll
                    for (int l = 0; l < VECTOR; ++l) values[b].at[l] *= chunk.weights[j + b];
                }
                if (j + b == 0) {
                    sum = values[b];
                } else if (chunk.starts >> (j + b) & 1) {
                    if (is_head) {
                        store(head + column, sum);
                    } else if (segment >= 0) {
                        finish<HEADS>(sum, out + segment * DIM + column);
                    }
                    segment = HEADS ? chunk.rows[j + b] : segment + 1;
                    is_head = false;
                    sum = values[b];
                } else {
#pragma unroll
                    for (int l = 0; l < VECTOR; ++l) sum.at[l] += values[b].at[l];
                }
            }
        }
        if (is_head) {
            store(head + column, sum);
        } else if (segment >= 0) {
            finish<HEADS>(sum, out + segment * DIM + column);
        }
    }
}

// The last u with offsets[u] <= p; all lanes of a warp ask for the same p.
__device__ int64_t segment_of(const int64_t* offsets, int64_t segments, int64_t p) {
    const int lane = threadIdx.x % WARP;
    int64_t low = 0, high = p + 1 < segments ? p + 1 : segments;  // offsets[u] >= u
    while (high - low > 1) {
        const int64_t step = (high - low + WARP - 1) / WARP, at = low + lane * step;
        const unsigned below = __ballot_sync(FULL, at < high && offsets[at] <= p);
        low += (__popc(below) - 1) * step;
        high = low + step < high ? low + step : high;
    }
    return low;
}

__device__ __forceinline__ void write_owner(const Chunk& chunk, int64_t number, int64_t* owners) {
    if (threadIdx.x % LANES == 0 && chunk.count > 0) {
        owners[number] = chunk.starts & 1 ? -1 : chunk.segment;
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(256)
    segment_sum(const float* x, const int64_t* offsets, const int64_t* positions,
                const int64_t* index, const float* weights, float* heads, int64_t* owners,
                float* out, int64_t segments, int64_t n) {
    __shared__ int64_t rows[CHUNKS][ROWS + 1];  // one more, so that chunks lie in other banks
    __shared__ float factors[WEIGHTED ? CHUNKS : 1][ROWS + 1];
    __shared__ uint8_t flags[CHUNKS * ROWS];
    __shared__ unsigned starts[CHUNKS];
    __shared__ int64_t first_segment;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int64_t block_first = int64_t(blockIdx.x) * (CHUNKS * ROWS);
    const int of_block = n - block_first < CHUNKS * ROWS ? int(n - block_first) : CHUNKS * ROWS;
#pragma unroll
    for (int q = 0; q < OF_WARP; ++q) {
        const int at = (warp * OF_WARP + q) * ROWS + lane;
        if (at < of_block) {
            const int64_t i = positions[block_first + at];
            rows[warp * OF_WARP + q][lane] = INDEXED ? index[i] : i;
            if (WEIGHTED) factors[warp * OF_WARP + q][lane] = weights[i];
        }
        flags[at] = 0;
    }
    if (warp == 0) {
        const int64_t found = segment_of(offsets, segments, block_first);
        if (lane == 0) first_segment = found;
    }
    __syncthreads();
    for (int64_t u = first_segment + threadIdx.x; u < segments; u += 256) {
        const int64_t at = offsets[u] - block_first;
        if (at >= of_block) break;
        if (at >= 0) flags[at] = 1;
    }
    __syncthreads();
#pragma unroll
    for (int q = 0; q < OF_WARP; ++q) {
        const unsigned word = __ballot_sync(FULL, flags[(warp * OF_WARP + q) * ROWS + lane]);
        if (lane == 0) starts[warp * OF_WARP + q] = word;
    }
    __syncthreads();
    const int c = warp * OF_WARP + lane / LANES;
    int before = 0;  // segments that begin in earlier chunks of the block
#pragma unroll
    for (int i = lane; i < CHUNKS; i += WARP) {
        if (i < warp * OF_WARP) before += __popc(starts[i]);
    }
    before = __reduce_add_sync(FULL, before);
    for (int i = warp * OF_WARP; i < c; ++i) before += __popc(starts[i]);
    const int64_t number = int64_t(blockIdx.x) * CHUNKS + c;
    const int64_t segment =
        first_segment + before + static_cast<int>(starts[c] & 1) - static_cast<int>(starts[0] & 1);
    const float* own = WEIGHTED ? factors[c] : nullptr;
    const Chunk chunk = {rows[c], own, starts[c], of_block - c * ROWS, number * ROWS, segment};
    write_owner(chunk, number, owners);
    add_up<false>(chunk, x, heads + number * DIM, out);
}

extern "C" __global__ void __launch_bounds__(32)
    combine_heads(const float* x, const int64_t* segments, float* heads, int64_t* owners,
                  float* out, int64_t n) {
    __shared__ int64_t rows[OF_WARP][ROWS + 1];
    const int lane = threadIdx.x;
    unsigned starts = 0;
#pragma unroll
    for (int c = 0; c < OF_WARP; ++c) {
        const int64_t at = (int64_t(blockIdx.x) * OF_WARP + c) * ROWS + lane;
        const int64_t segment = at < n ? segments[at] : -1;
        int64_t before = __shfl_up_sync(FULL, segment, 1);
        if (lane == 0) before = at > 0 && at < n ? segments[at - 1] : -1;
        const bool start = segment != before || (lane == 0 && segment < 0);
        const unsigned word = __ballot_sync(FULL, start);
        if (c == lane / LANES) starts = word;
        rows[c][lane] = segment;
    }
    __syncwarp();
    const int c = lane / LANES;
    const int64_t number = int64_t(blockIdx.x) * OF_WARP + c, first = number * ROWS;
    const int count = n - first < ROWS ? static_cast<int>(n - first) : ROWS;
    const Chunk chunk = {rows[c], nullptr, starts, count, first, rows[c][0]};
    write_owner(chunk, number, owners);
    add_up<true>(chunk, x, heads + number * DIM, out);
}
